"""What goes in and what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from redrafter.engine.exactness import Exactness
from redrafter.errors import ConfigError
from redrafter.runtime.row import Request

__all__ = ["Completion", "FinishReason", "Part", "Request", "Stats", "as_list", "request_options"]

FinishReason = Literal["stop", "length"]


@dataclass
class Stats:
    """How a row was written."""

    rule: str
    lossless: bool
    steps: int = 0
    """Steps after the prompt's own pass, which gives the first token."""
    tokens: int = 0
    accepted: int = 0
    """Drafted tokens kept."""
    nodes: int = 0
    """Drafted nodes verified."""
    accepted_per_step: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """Spent decoding; what the reader of a stream does in between is not counted."""
    first_token_seconds: float = 0.0
    exactness: Exactness | None = "ties"
    """What is promised about the tokens; see `engine.exactness`. None: the rule makes no such promise."""
    plain_steps: int = 0
    """Steps that verified no drafted node."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens gained per step; the first token belongs to the prompt's pass and counts in neither."""
        return (self.tokens - 1) / self.steps if self.steps else float(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Part:
    """What one step added to one row."""

    row: int
    text: str
    tokens: list[int]
    accepted: int
    """How many of the tokens, from the first on, were guessed by the drafter."""
    stats: Stats
    finish_reason: FinishReason | None
    pieces: list[str] = field(default_factory=list)
    """The text token by token; a token that only begins a character brings none."""


@dataclass(frozen=True)
class Completion:
    """A finished row."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: Stats


def request_options(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k != "logits_processor"}


def as_list(prompts: Any) -> tuple[bool, list[Any]]:
    """(was it one prompt?, prompts). One prompt is text, a list of ids, or a list of messages."""
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, Mapping):
        raise ConfigError('give the ids alone: tokenizer(...)["input_ids"], not all that the tokenizer returns')
    if not hasattr(prompts, "__iter__"):
        raise ConfigError(f"a prompt is text, token ids or chat messages, not {prompts!r}")
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not items:
        raise ConfigError("no prompt given")
    if isinstance(items[0], Integral | dict):
        return True, [items]
    return False, items
