"""Prompts of requests as token ids. What cannot fit is refused by its characters, before it takes time and memory."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redrafter.engine import Engine
from redrafter.errors import ConfigError, PromptTooLong, RedrafterError
from redrafter.serve.chat_prompt import ChatPrompts
from redrafter.serve.schema import ChatAsked, CompletionAsked, TokenizeAsked

PIECE = 12
"""Characters for each token that fits: a longer text is counted piece by piece first. Prose has 3 to 5 to a token."""
SURELY = 2
"""A text whose pieces have so many times the tokens that fit does not fit: a cut adds few tokens."""

T = TypeVar("T")


class Prompts:
    """Any number of threads may ask at once. `limit`: most tokens of a prompt; `name`: what errors call the model."""

    def __init__(self, engine: Engine, chat: ChatPrompts, name: str, limit: int) -> None:
        self.engine, self.chat, self.name, self.limit = engine, chat, name, limit
        self.tokenizer = engine.target.tokenizer
        self.longest = max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer is not None else 1
        safe = getattr(self.tokenizer, "is_fast", False)  # written in Rust
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if safe else threading.RLock()

    def read(self, asked: ChatAsked | CompletionAsked) -> list[list[int]]:
        """Raises ConfigError or PromptTooLong."""
        if isinstance(asked, ChatAsked):
            return [self._messages(asked, self._check)]
        return [prompt if isinstance(prompt, list) else self._text(prompt) for prompt in asked.prompts]

    def tokenize(self, asked: TokenizeAsked) -> list[int]:
        """Of any length that the schema allows."""
        if asked.messages is not None:
            return self._messages(asked)
        return self._guarded("prompt", lambda: self._tokens(asked.prompt or "", asked.add_special_tokens))

    def decode(self, tokens: Sequence[int]) -> str:
        if tokens and max(tokens) >= self.engine.target.vocab_size:
            raise ConfigError(f"tokens has ids outside the vocabulary of {self.engine.target.vocab_size}")
        with self.lock:
            return str(self.tokenizer.decode(list(tokens)))

    def _text(self, text: str) -> list[int]:
        self._guarded("prompt", lambda: self._check(text))
        return self._guarded("prompt", lambda: self._tokens(text))

    def _messages(self, asked: ChatAsked | TokenizeAsked, check: Callable[[str], None] | None = None) -> list[int]:
        def read() -> list[int]:
            with self.lock:
                return self.chat.ids(
                    asked.messages or (),
                    opens=asked.add_generation_prompt,
                    continues=asked.continue_final_message,
                    tools=asked.offered,
                    check=check,
                )

        return self._guarded("messages", read)

    def _tokens(self, text: str, special: bool = True) -> list[int]:
        with self.lock:
            return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _guarded(self, what: str, read: Callable[[], T]) -> T:
        """Whatever a tokenizer or a chat template raises is about what the client sent."""
        try:
            return read()
        except RedrafterError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name} cannot read the {what}: {error}") from error

    def _check(self, text: str) -> None:
        """Raise for a text that has too many tokens for sure."""
        most = self.limit * self.longest
        if len(text) > most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters and this server takes at most {self.limit} tokens, which hold "
                f"at most {most} characters: shorten it"
            )
        size, tokens = PIECE * self.limit, 0
        for start in range(0, len(text) if len(text) > size else 0, size):
            tokens += len(self._tokens(text[start : start + size]))
            if tokens > SURELY * self.limit:
                raise PromptTooLong(f"the prompt has more tokens than the {self.limit} of this server: shorten it")
