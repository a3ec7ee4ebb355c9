"""Requests in, tokens out: one step after another, draft, verify, accept, commit. Start reading here."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

from redrafter_mlx.accept import Accepted, accept_seeded, count_tokens, target_choices
from redrafter_mlx.beam import Search
from redrafter_mlx.completion import Completion, Stats
from redrafter_mlx.config import SamplingParams, Shape
from redrafter_mlx.drafter import NoDrafter
from redrafter_mlx.ngram import DEEPEST
from redrafter_mlx.noise import as_seeds, gumbel
from redrafter_mlx.target import Target
from redrafter_mlx.tree import root_tree


@dataclass
class Response(GenerationResponse):
    """mlx-lm's response for each token. A token that only begins a character brings no text."""

    stats: Stats = field(default_factory=Stats)  # of the row so far


@dataclass
class PromptCache:
    """What was read for one conversation. The next prompt that begins alike reads only the rest."""

    ids: list[int] = field(default_factory=list)
    cache: Any = None  # a TreeCache, once there is a target
    hidden: list[mx.array] = field(default_factory=list)  # (B, n, C) of each piece

    def read(self, target: Target, texts: list[list[int]]) -> int:
        """Read texts from their first token on -> how many tokens were known, which only one text can have."""
        self.cache = self.cache or target.make_cache(len(texts))
        same = [a == b for a, b in zip(self.ids, texts[0], strict=False)]
        reused = [*same, False].index(False)
        self.cache.lengths = [reused] * len(texts)
        self.ids = self.ids[:reused]  # should reading be interrupted
        if self.hidden:
            self.hidden = [mx.concatenate(self.hidden, axis=1)[:, :reused]]
        self.hidden += target.read([text[reused:] for text in texts], self.cache)
        self.ids = texts[0]
        return reused


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
        self.began, self.spent = time.perf_counter(), 0.0
        self.target, self.drafter, self.shape, self.rows, self.params = target, drafter, shape, rows, params
        self.kept = kept if len(rows) == 1 else None
        read = self.kept or PromptCache()
        reused = read.read(target, [row.prompt[:-1] for row in rows])
        for row in rows:
            row.stats.prompt_tokens, row.stats.reused = len(row.prompt), reused
        hidden = mx.concatenate(read.hidden, axis=1) if read.hidden else None
        self.cache, self.state = read.cache, drafter.begin([row.prompt for row in rows], hidden)
        self.first = True

    def steps(self) -> Iterator[list[Response]]:
        """One list of responses per step. The next step is launched before its predecessor's are handed out."""
        flight = self.launch()
        while self.rows:
            responses = self.collect(*flight)
            self.keep([i for i, row in enumerate(self.rows) if row.finish_reason is None])
            if self.rows:
                flight = self.launch()
            self.spent += time.perf_counter() - self.began
            yield responses
            self.began = time.perf_counter()

    def launch(self) -> tuple[Accepted, mx.array, mx.array | None]:
        """Draft, verify and accept -> what was accepted, and logits and hidden states (B, L+1, ·) along its path.

        Nothing waits for the device: the graph is built and started.
        """
        params, shape, vocab_size = self.params, self.shape, self.target.vocab_size
        texts = [row.prompt + row.tokens for row in self.rows]
        counts = count_tokens(texts, vocab_size) if params.penalises else None
        noise = None
        if params.temperature > 0:
            ahead = 1 if self.first else max(shape.length, min(shape.budget, DEEPEST)) + 1
            positions = mx.array([[n + 1 + i for i in range(ahead)] for n in self.cache.lengths])
            noise = gumbel(as_seeds([row.seed for row in self.rows]), positions, vocab_size)
        if self.first:
            tree = root_tree(texts)
        else:
            tree = self.drafter.draft(self.state, texts, Search(shape, params.temperature, noise))
        logits, hidden = self.target.run(tree.tokens, self.cache, tree)
        accepted = accept_seeded(target_choices(logits, tree, params, noise, counts), tree)
        mx.async_eval(*accepted)
        path = accepted.path[..., None]
        along = None if hidden is None else mx.take_along_axis(hidden, path, axis=1)
        return accepted, mx.take_along_axis(logits, path, axis=1), along

    def collect(self, accepted: Accepted, logits: mx.array, hidden: mx.array | None) -> list[Response]:
        """Read a step's results, which waits for the device once, and commit them."""
        mx.eval(*accepted)
        results = [x.tolist() for x in accepted]
        seconds = self.spent + time.perf_counter() - self.began
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # computed only if they are looked at
        responses, paths, gained = [], [], []
        for i, (row, path, tokens, count, nodes) in enumerate(zip(self.rows, *results, strict=True)):
            stats, before = row.stats, row.stats.tokens
            pieces = row.take(tokens[:count])
            kept = len(pieces)
            guessed = min(kept, count - 1)
            stats.seconds = seconds
            stats.accepted += guessed
            if self.first:
                stats.prompt_seconds = seconds
            else:
                stats.steps += 1
                stats.nodes += nodes
            paths.append(path[:kept])
            gained.append(tokens[:kept])
            responses += [
                Response(
                    text=pieces[j],
                    token=tokens[j],
                    logprobs=logprobs[i, j],
                    from_draft=j < guessed,
                    prompt_tokens=stats.prompt_tokens,
                    prompt_tps=stats.prompt_tokens / stats.prompt_seconds,
                    generation_tokens=before + j + 1,
                    generation_tps=stats.tokens_per_second,
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=row.finish_reason if j == kept - 1 else None,
                    stats=stats,
                )
                for j in range(kept)
            ]
        self.cache.commit(paths)
        self.state = self.drafter.advance(self.state, gained, hidden)
        if self.kept is not None:
            self.kept.ids = (self.rows[0].prompt + self.rows[0].tokens)[:-1]
            if hidden is not None:
                self.kept.hidden.append(hidden[:, : len(gained[0])])
        self.first = False
        return responses

    def keep(self, rows: list[int]) -> None:
        """Drop the rows that are done."""
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in rows]
        if rows:
            self.cache.keep(rows)
            self.state = self.drafter.keep(self.state, rows)
