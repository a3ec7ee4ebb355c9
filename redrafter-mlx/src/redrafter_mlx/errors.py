"""Every error a user can meet. The CLI prints one line of it and exits with code 2."""


class RedrafterError(Exception):
    """Something the user can mend; the message says what was got and what to do."""


class ConfigError(RedrafterError):
    """A parameter is out of range or two of them contradict each other."""


class ModelNotFound(RedrafterError):
    """No model or drafter lies where the user pointed, or mlx itself is missing."""


class UnsupportedTarget(RedrafterError):
    """The model cannot be verified as a tree, with the reason."""


class DrafterMismatch(RedrafterError):
    """The drafter was made for a target of another shape or tokenizer."""


class CorruptCheckpoint(RedrafterError):
    """A file exists but cannot be read as what it should be."""
