"""Every error a user can meet. The CLI prints one line of it and exits with code 2."""


class RedrafterError(Exception):
    """Something the user can mend; the message says what was got and what to do."""


class ConfigError(RedrafterError):
    """A parameter is out of range or two of them contradict each other."""


class ModelNotFound(RedrafterError):
    """No model or drafter lies where the user pointed."""


class UnsupportedTarget(RedrafterError):
    """The model cannot be verified as a tree, with the reason."""


class NotExact(RedrafterError):
    """The user requires the tokens of plain decoding without exception, and this cannot be promised."""


class DrafterMismatch(RedrafterError):
    """The drafter was made for a target of another shape or tokenizer."""


class UnsupportedDrafter(RedrafterError):
    """The drafter is of a known kind that is not run here, or guesses nothing of this target's texts."""


class CorruptCheckpoint(RedrafterError):
    """A file exists but cannot be read as what it should be."""


class CacheUnavailable(RedrafterError):
    """The user's cache folder cannot be read, written, or is full."""


class OutOfMemory(RedrafterError):
    """The device has no room for what was asked."""


class PromptTooLong(RedrafterError):
    """The prompt leaves no room for a new token in the target's context."""


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
