"""What goes in and what comes out."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Literal

from redrafter.bounds import check_value
from redrafter.engine.encode import as_items, as_plain, check_tokens
from redrafter.engine.exactness import Exactness
from redrafter.errors import ConfigError, PromptTooLong
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.targets.media_tokens import check_text_only

__all__ = ["Completion", "FinishReason", "Part", "Request", "Stats", "as_list", "check_request", "room", "seeds_of"]

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
    expected: float = 0.0
    """Drafted tokens that the planner expected to keep; 0 where nothing is planned."""

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


def as_list(prompts: Any) -> tuple[bool, list[Any]]:
    """(was it one prompt?, prompts). One prompt is text, a list of ids, or a list of messages."""
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, Mapping):
        raise ConfigError('give the ids alone: tokenizer(...)["input_ids"], not all that the tokenizer returns')
    items = as_items(prompts)
    if not items:
        raise ConfigError("no prompt given")
    if isinstance(items[0], Number | Mapping):
        return True, [items]
    return False, items


def seeds_of(given: Any, count: int) -> list[int]:
    """One seed for each of `count` prompts, drawn at random if none is given."""
    seed = as_plain(given)
    check_value("seed", seed, int | Sequence[int] | None)
    if seed is None:
        return [secrets.randbits(63) for _ in range(count)]
    seeds = [int(one) for one in seed] if isinstance(seed, Sequence) else [int(seed)] * count
    if len(seeds) != count:
        raise ConfigError(f"got {len(seeds)} seeds for {count} prompts")
    return seeds


def check_request(request: Request, target: Target) -> None:
    """Raise ConfigError for tokens that the target does not know, PromptTooLong for a prompt without room behind it."""
    check_tokens(request.prompt, target.vocab_size)
    check_text_only(request.prompt, target.media_tokens, target.name)
    room(target, request.prompt)
    for token in request.sampling.logit_bias:
        if not 0 <= token < target.vocab_size:
            raise ConfigError(f"logit_bias names token {token}, outside the vocabulary of {target.vocab_size}")


def room(target: Target, prompt: Sequence[int]) -> int:
    """New tokens that fit behind a prompt."""
    if len(prompt) >= target.max_positions:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens and {target.name} a context of {target.max_positions}: shorten it "
            f"to at most {target.max_positions - 1}"
        )
    return target.max_positions - len(prompt)
