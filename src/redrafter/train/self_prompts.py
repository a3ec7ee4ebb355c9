"""No data at all: the target writes the user's turns itself, and what is of no use is dropped."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from redrafter.config import SamplingParams
from redrafter.core.noise import as_int64, fold
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.errors import ConfigError
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.targets.tokenizer import first_token, has_chat_template

SENTINEL = "redrafter-user-turn"
TURNS = -1
"""Seeds of user turns are folded from the seed's choice -1; those of answers are its choices 0, 1, 2, ..."""
LETTERS = 6
"""A turn with fewer asks nothing."""


@dataclass(frozen=True)
class Piece:
    """What a source offers for a row: a prompt, or (with `seed`) a text that is written already."""

    tokens: list[int]
    mark: int
    """The same for texts that differ only in case and spaces."""
    dropped: str | None = None
    """Why it is of no use."""
    seed: int | None = None
    temperature: float = 1.0


def mark(text: str) -> int:
    """
    >>> mark("Why  is it?\\n") == mark("why is it?") != mark("Who is it?")
    True
    """
    return _digest(" ".join(text.lower().split()).encode())


def _digest(content: bytes) -> int:
    return as_int64(int.from_bytes(hashlib.sha256(content).digest()[:8]))


def repeats(tokens: Sequence[int]) -> bool:
    """Whether it is one phrase over and over: fewer than half of its pairs of neighbours are new.

    >>> repeats([1, 2, 3] * 3), repeats([1, 2, 3, 1, 2, 4])
    (True, False)
    """
    pairs = list(pairwise(tokens))
    return 2 * len(set(pairs)) < len(pairs)


@dataclass(frozen=True)
class UserTurn:
    """What stands before a user's words in the chat template, and the tokens that end a user's turn."""

    prefix: tuple[int, ...]
    ends: tuple[int, ...]


def messages(turns: Sequence[str]) -> list[dict[str, str]]:
    """Turns of a user and an assistant, the user's first, as a chat template takes them."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def user_turn(target: Target, earlier: Sequence[str] = (), start: str = "") -> UserTurn:
    """Read off the chat template with a stand-in for the user's words.

    `earlier` are the turns before it, `start` the words that the user's turn begins with.
    """
    tokenizer = target.tokenizer
    chat = messages([*earlier, SENTINEL])
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False))
    before, found, after = text.partition(SENTINEL)
    if not found:
        raise ConfigError(f"the chat template of {target.name} hides what the user says: give prompts from a file")

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ends = [*ids(after)[:1], *Engine(target, NoDrafter()).eos_tokens()]
    if not ends:
        raise ConfigError(f"no token ends a user's turn in {target.name}: give prompts from a file")
    prefix = ids(before + start) or [first_token(target, 0)]
    return UserTurn(prefix=tuple(prefix), ends=tuple(dict.fromkeys(ends)))


class SelfPrompts:
    """Endless user turns, or whole texts where the model knows no turns; the i-th is a function of seed and i.

    All are written at temperature 1: a greedy target has only one thing to say after its template.
    """

    endless = True

    def __init__(
        self,
        target: Target,
        encode: Callable[[list[tuple[str, ...]]], list[list[int]]],
        *,
        seed: int,
        budget: int,
        rows: int,
        progress: Callable[[int], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self.encode, self.rows, self.progress, self.check = target, encode, rows, progress, check
        self.seed = fold(seed, TURNS)
        self.turn = user_turn(target) if has_chat_template(target) else None
        self.budget = budget
        self.special = special_tokens(target.tokenizer) if self.turn else frozenset()
        self.known = len(target.tokenizer) if self.turn else 0

    def take(self, first: int, count: int) -> list[Piece]:
        """Pieces first, first + 1, ..."""
        seeds = [fold(self.seed, i) for i in range(first, first + count)]
        if self.turn is None:
            return self._whole_texts(seeds)
        texts, reasons = self.turns(seeds, [self.turn] * count)
        return self.pieces([(text,) for text in texts], reasons)

    def turns(self, seeds: Sequence[int], turns: Sequence[UserTurn]) -> tuple[list[str], list[str | None]]:
        """What the target writes as the user, after each prefix; and why that is of no use, if it is not."""
        if not turns:
            return [], []
        new = self._write(seeds, [(turn.prefix, turn.ends) for turn in turns], self.budget)
        texts = [text.strip() for text in self.target.tokenizer.batch_decode([tokens[:-1] for tokens in new])]
        return texts, [self._reason(tokens, text) for tokens, text in zip(new, texts, strict=True)]

    def pieces(self, chats: Sequence[tuple[str, ...]], reasons: Sequence[str | None]) -> list[Piece]:
        """The prompts of these chats, those of no use empty."""
        kept = iter(self.encode([chat for chat, why in zip(chats, reasons, strict=True) if why is None]))
        return [
            Piece(next(kept), mark("\n".join(chat))) if why is None else Piece([], 0, why)
            for chat, why in zip(chats, reasons, strict=True)
        ]

    def _whole_texts(self, seeds: Sequence[int]) -> list[Piece]:
        ends = tuple(Engine(self.target, NoDrafter()).eos_tokens())
        starts = [(first_token(self.target, seed),) for seed in seeds]
        new = self._write(seeds, [(start, ends) for start in starts], self.budget)
        return [self._text([*start, *tokens], seed) for start, tokens, seed in zip(starts, new, seeds, strict=True)]

    def _write(
        self, seeds: Sequence[int], starts: Sequence[tuple[Sequence[int], Sequence[int]]], budget: int
    ) -> list[list[int]]:
        """What the target writes after each of these prefixes until one of their ends, at temperature 1."""
        requests = [
            Request(
                prompt=list(prefix),
                seed=seed,
                max_new_tokens=max(1, min(budget, self.target.max_positions - len(prefix))),
                sampling=SamplingParams(temperature=1.0),
                eos=tuple(ends),
            )
            for seed, (prefix, ends) in zip(seeds, starts, strict=True)
        ]
        return write_texts(self.target, requests, rows=self.rows, progress=self.progress, check=self.check)

    def _text(self, tokens: list[int], seed: int) -> Piece:
        """A whole text. It need not have ended, and its special tokens are its own affair."""
        own = _digest(",".join(map(str, tokens[1:])).encode())
        return Piece(tokens, own, "repetitive" if repeats(tokens) else None, seed)

    def _reason(self, tokens: list[int], text: str) -> str | None:
        """Why a turn is of no use, if it is not."""
        assert self.turn is not None
        said = tokens[:-1]
        if tokens[-1] not in self.turn.ends:
            return "did not end"
        if said and (max(said) >= self.known or not self.special.isdisjoint(said)):
            return "special tokens inside"
        if "\ufffd" in text or sum(c.isalpha() for c in text) < LETTERS:
            return "hardly any words"
        return "repetitive" if repeats(said) else None


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
