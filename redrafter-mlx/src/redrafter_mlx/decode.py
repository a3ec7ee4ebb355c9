"""Requests in, parts of text out: one step after another, draft, verify, accept, commit. Start reading here."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from redrafter_mlx.accept import Accepted, accept_seeded
from redrafter_mlx.cache import TreeCache
from redrafter_mlx.config import SamplingParams, Shape
from redrafter_mlx.drafter import NoDrafter, Search
from redrafter_mlx.ngram import DEEPEST
from redrafter_mlx.noise import as_seeds, gumbel
from redrafter_mlx.sampling import count_tokens, target_choices
from redrafter_mlx.target import Target
from redrafter_mlx.text import TextWriter
from redrafter_mlx.tree import root_tree

FinishReason = Literal["stop", "length"]


@dataclass
class Stats:
    """How a row was written."""

    steps: int = 0
    """Steps after the prompt's own pass, which gives the first token."""
    tokens: int = 0
    accepted: int = 0
    """Drafted tokens kept."""
    nodes: int = 0
    """Drafted nodes verified."""
    prompt_tokens: int = 0
    reused: int = 0
    """Prompt tokens taken from the prompt cache instead of read."""
    prompt_seconds: float = 0.0
    """Until the first token."""
    seconds: float = 0.0
    """Spent decoding, prompt included; what the reader of a stream does in between is not counted."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens gained per step; the first token belongs to the prompt's pass and counts in neither."""
        return (self.tokens - 1) / self.steps if self.steps else float(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Of the text alone, without the prompt's pass and its token."""
        spent = self.seconds - self.prompt_seconds
        return (self.tokens - 1) / spent if spent > 0 else 0.0


@dataclass(frozen=True)
class Part:
    """What one step added to one row."""

    tokens: list[int]
    pieces: list[str]
    """The text token by token; a token that only begins a character brings none."""
    accepted: int
    """How many of the tokens, from the first on, were guessed by the drafter."""
    logits: mx.array
    """(n, V) what the target gave each token's choice; computed only if it is looked at."""
    stats: Stats
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class PromptCache:
    """What was read for one conversation. The next prompt that begins alike reads only the rest."""

    ids: list[int] = field(default_factory=list)
    cache: TreeCache | None = None
    hidden: list[mx.array] = field(default_factory=list)  # (n, C) of each piece


@dataclass(eq=False)
class Completion:
    """A request and the text that it has so far."""

    prompt: list[int]
    max_new_tokens: int
    seed: int
    eos: Sequence[int]
    """Token ids that end the text (they are part of its tokens)."""
    writer: TextWriter
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return self.writer.ids

    @property
    def text(self) -> str:
        return self.writer.text

    def take(self, tokens: list[int]) -> list[str]:
        """The text of each new token, up to where the row ends."""
        pieces: list[str] = []
        for token in tokens:
            self.stats.tokens += 1
            stopped = self.writer.add(token)
            pieces.append(self.writer.take())
            if stopped or token in self.eos:
                self.finish_reason = "stop"
            elif self.stats.tokens == self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                pieces[-1] += self.writer.take(final=True)
                break
        return pieces


@dataclass
class Flight:
    """A step that was launched and not yet read."""

    accepted: Accepted
    logits: mx.array  # (B, L+1, V) along the accepted path
    hidden: mx.array | None  # (B, L+1, C)


class Batch:
    """Rows that step together."""

    def __init__(
        self,
        target: Target,
        drafter: NoDrafter,
        shape: Shape,
        rows: list[Completion],
        params: SamplingParams,
        kept: PromptCache | None,
    ) -> None:
        """Read the prompts, all but their last tokens, which the first step verifies as trees without guesses."""
        self.target, self.drafter, self.shape, self.params = target, drafter, shape, params
        self.rows, self.kept, self.began = rows, kept if len(rows) == 1 else None, time.perf_counter()
        prompts = [row.prompt for row in rows]
        read = [self._read(row, self.kept or PromptCache()) for row in rows]
        self.cache = TreeCache.joined([cache for cache, _ in read])
        self.state = drafter.begin(prompts, [hidden for _, hidden in read])
        self.seeds = as_seeds([row.seed for row in rows])
        self.counts = count_tokens(prompts, target.vocab_size) if params.penalises else None
        self.first = True

    def _read(self, row: Completion, kept: PromptCache) -> tuple[TreeCache, Any]:
        if kept.cache is None:
            kept.cache = self.target.make_cache()
        whole = row.prompt[:-1]
        reused = common_prefix(kept.ids, whole)
        if self.target.layers and kept.hidden:
            kept.hidden = [mx.concatenate(kept.hidden)[:reused]]
        kept.cache.trim(reused)
        kept.ids = whole[:reused]  # should reading be interrupted
        kept.hidden += self.target.read(whole[reused:], kept.cache)
        kept.ids = whole
        row.stats.prompt_tokens, row.stats.reused = len(row.prompt), reused
        return kept.cache, mx.concatenate(kept.hidden) if kept.hidden else None

    def steps(self) -> Iterator[list[Part]]:
        """One list of parts per step. The next step is launched before its predecessor's parts are handed out."""
        spent, flight = 0.0, self.launch()
        while self.rows:
            rows, first = self.rows, self.first
            parts = self.collect(flight)
            self.keep([i for i, part in enumerate(parts) if part.finish_reason is None])
            if self.rows:
                flight = self.launch()
            spent += time.perf_counter() - self.began
            for row in rows:
                row.stats.seconds = spent
                if first:
                    row.stats.prompt_seconds = spent
            yield parts
            self.began = time.perf_counter()

    def launch(self) -> Flight:
        """Draft, verify and accept. Nothing waits for the host: the graph is built and started."""
        params, shape = self.params, self.shape
        last = mx.array([(row.prompt + row.tokens)[-1] for row in self.rows])
        noise = None
        if params.temperature > 0:
            ahead = 1 if self.first else max(shape.length, min(shape.budget, DEEPEST)) + 1
            positions = mx.array([[n + 1 + i for i in range(ahead)] for n in self.cache.lengths])
            noise = gumbel(self.seeds, positions, self.target.vocab_size)
        search = Search(shape, params.temperature, noise)
        tree = root_tree(last) if self.first else self.drafter.draft(self.state, last, search)
        logits, hidden = self.target.verify(tree, self.cache)
        accepted = accept_seeded(target_choices(logits, tree, params, noise, self.counts), tree)
        along = accepted.path[..., None]
        flight = Flight(
            accepted,
            mx.take_along_axis(logits, along, axis=1),
            None if hidden is None else mx.take_along_axis(hidden, along, axis=1),
        )
        mx.async_eval(accepted.path, accepted.tokens, accepted.count, accepted.nodes)
        return flight

    def collect(self, flight: Flight) -> list[Part]:
        """Read a step's results, which waits for the device once, and commit them."""
        accepted = flight.accepted
        mx.eval(accepted.path, accepted.tokens, accepted.count, accepted.nodes)
        results = (accepted.path.tolist(), accepted.tokens.tolist(), accepted.count.tolist(), accepted.nodes.tolist())
        parts, paths, gained = [], [], []
        for i, (row, path, tokens, count, nodes) in enumerate(zip(self.rows, *results, strict=True)):
            pieces = row.take(tokens[:count])
            kept = len(pieces)
            guessed = min(kept, count - 1)
            row.stats.accepted += guessed
            if not self.first:
                row.stats.steps += 1
                row.stats.nodes += nodes
            paths.append(path[:kept])
            gained.append(tokens[:kept])
            parts.append(Part(tokens[:kept], pieces, guessed, flight.logits[i, :kept], row.stats, row.finish_reason))
        self.cache.commit(paths)
        self.state = self.drafter.advance(self.state, gained, flight.hidden)
        if self.counts is not None:
            self.counts = self.counts + count_tokens(gained, self.target.vocab_size)
        if self.kept is not None:
            self.kept.ids = (self.rows[0].prompt + self.rows[0].tokens)[:-1]
            if flight.hidden is not None:
                self.kept.hidden.append(flight.hidden[0, : len(gained[0])])
        self.first = False
        return parts

    def keep(self, rows: list[int]) -> None:
        """Drop the rows that are done."""
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in rows]
        if rows:
            self.cache.keep(rows)
            self.state = self.drafter.keep(self.state, rows)
            self.seeds = self.seeds[mx.array(rows)]
            self.counts = None if self.counts is None else self.counts[mx.array(rows)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5]), common_prefix([], [1]), common_prefix([1, 2], [1, 2])
    (2, 0, 2)
    """
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
