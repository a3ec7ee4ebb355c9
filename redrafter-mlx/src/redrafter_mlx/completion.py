"""One request: its text as it comes, stop strings found in it, and how it was written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

LONGEST_WINDOW = 64  # tokens decoded together; no character has as many


@dataclass
class Stats:
    """How a row was written."""

    steps: int = 0  # after the prompt's own pass, which gives the first token
    tokens: int = 0
    accepted: int = 0  # drafted tokens kept
    nodes: int = 0  # drafted nodes verified
    prompt_tokens: int = 0
    reused: int = 0  # prompt tokens taken from the prompt cache instead of read
    prompt_seconds: float = 0.0  # until the first token
    seconds: float = 0.0  # spent decoding, prompt included; without what the reader of a stream does in between

    @property
    def tokens_per_step(self) -> float:
        """Tokens gained per step; the first token belongs to the prompt's pass and counts in neither."""
        return (self.tokens - 1) / self.steps if self.steps else float(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Of the text alone, without the prompt's pass and its token."""
        spent = self.seconds - self.prompt_seconds
        return (self.tokens - 1) / spent if spent > 0 else 0.0


@dataclass(eq=False)
class Completion:
    """A request and the text that it has so far.

    Bytes of an unfinished character and what may become a stop string are held back. Tokens are taken one by one, so
    what is found does not depend on how many came in a step.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    eos: Sequence[int]  # token ids that end the text (they are part of its tokens)
    tokenizer: Any = None
    stop: Sequence[str] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""  # what is decided; a stop string is cut off
    stats: Stats = field(default_factory=Stats)
    finish_reason: Literal["stop", "length"] | None = None
    given: int = 0  # characters handed out
    begin: int = 0  # the first of the tokens that are decoded together
    known: int = 0  # the first of the tokens that are not in `text`

    def take(self, tokens: list[int]) -> list[str]:
        """The text of each new token, up to where the row ends."""
        pieces = []
        for token in tokens:
            pieces.append(self._add(token))
            if self.finish_reason:
                break
        return pieces

    def _add(self, token: int) -> str:
        """Take a token -> the text that is sure now."""
        self.tokens.append(token)
        self.stats.tokens += 1
        if token in self.eos:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_new_tokens:
            self.finish_reason = "length"
        fresh = self._decode(self.begin, None)[len(self._decode(self.begin, self.known)) :]
        whole = fresh and not fresh.endswith("\ufffd")
        if whole or self.finish_reason or len(self.tokens) - self.begin > LONGEST_WINDOW:
            self.begin, self.known = self.known, len(self.tokens)
            self._append(fresh)
        held_back = 0 if self.finish_reason else self._begun()
        piece = self.text[self.given : len(self.text) - held_back]
        self.given += len(piece)
        return piece

    def _append(self, fresh: str) -> None:
        """Add to the text, up to a stop string."""
        search = max(0, len(self.text) - max((len(s) for s in self.stop), default=0))
        self.text += fresh
        found = [at for s in self.stop if (at := self.text.find(s, search)) >= 0]
        if found:
            self.text, self.finish_reason = self.text[: min(found)], "stop"

    def _begun(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        sizes = [n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])]
        return max(sizes, default=0)

    def _decode(self, begin: int, end: int | None) -> str:
        some = self.tokens[begin:end]
        return "" if self.tokenizer is None else str(self.tokenizer.decode(some, skip_special_tokens=True))
