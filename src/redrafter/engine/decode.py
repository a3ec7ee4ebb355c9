"""The loop around the steps: rows in, parts out, finished rows dropped."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from redrafter.config import RuleConfig
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.engine.processors import PathProcessors
from redrafter.engine.request import FinishReason, Part, Request, Stats
from redrafter.engine.text import TextWriter
from redrafter.errors import PromptTooLong
from redrafter.runtime.compiled import CompiledRun, Programs
from redrafter.runtime.eager import EagerRun, Gain, Start
from redrafter.targets import Target


class Row:
    """The host's side of one request."""

    def __init__(self, index: int, request: Request, rule: RuleConfig, tokenizer: Any) -> None:
        self.index, self.request = index, request
        self.ids = [*request.pads, *request.prompt]
        self.writer = TextWriter(tokenizer, request.stop)
        self.stats = Stats(rule=rule.name, lossless=rule.lossless)
        self.finish_reason: FinishReason | None = None

    def take(self, gain: Gain, place: int, elapsed: float, is_step: bool) -> Part:
        """Take what a step gave, up to where a stop string or a stopping criterion ends it."""
        tokens = gain.tokens[place]
        pieces: list[str] = []
        for token in tokens:
            self.ids.append(token)
            stopped = self.writer.add(token)
            pieces.append(self.writer.take())
            if stopped or (self.request.halts is not None and self.request.halts(self.ids)):
                self.finish_reason = "stop"
                break
        kept = len(pieces)
        if gain.done[place] and self.finish_reason is None:
            ended = bool(tokens) and tokens[-1] in self.request.eos
            self.finish_reason = "stop" if ended else "length"
        accepted = min(kept, gain.drafted[place])
        stats = self.stats
        stats.steps += is_step
        stats.tokens += kept
        stats.seconds = elapsed
        if is_step:
            stats.nodes += gain.nodes[place]
            stats.accepted += accepted
            stats.accepted_per_step.append(accepted)
        else:
            stats.first_token_seconds = elapsed
        rest = self.writer.take(final=True) if self.finish_reason is not None else ""
        if pieces:
            pieces[-1] += rest
        text = "".join(pieces) if pieces else rest
        return Part(self.index, text, tokens[:kept], accepted, stats, self.finish_reason, pieces)


def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    requests: Sequence[Request],
    processors: Sequence[Any] = (),
    programs: Programs | None = None,
    cache: KVCache | None = None,
) -> Iterator[list[Part]]:
    """One list of parts per step, for the rows still being written.

    `cache`: one with room for all of it, where the rows have more to look at than their prompts.
    """
    live = [Row(i, request, rule.config, target.tokenizer) for i, request in enumerate(requests)]
    sampling = Sampling.of([r.sampling for r in requests], target.vocab_size, target.device)
    if processors:
        sampling = replace(sampling, processor=PathProcessors(processors, lambda: [row.ids for row in live]))
    starts = [Start(r.prompt, r.seed, min(r.max_new_tokens, room(target, r.prompt)), r.eos) for r in requests]
    run = programs.run(sampling, starts) if programs else EagerRun(target, drafter, rule, sampling, starts, cache)
    try:
        yield from _steps(run, live)
    finally:
        run.close()


def _steps(run: EagerRun | CompiledRun, live: list[Row]) -> Iterator[list[Part]]:
    elapsed, began = 0.0, time.perf_counter()
    gain = run.prefill()
    is_step = False
    while True:
        elapsed += time.perf_counter() - began
        parts = []
        for place, row in enumerate(live):
            if row.finish_reason is None:
                parts.append(row.take(gain, place, elapsed, is_step))
                if row.finish_reason is not None and not gain.done[place]:
                    run.stop(place)
        yield parts
        began = time.perf_counter()
        open_places = [p for p, row in enumerate(live) if row.finish_reason is None]
        if not open_places:
            return
        if 2 * len(open_places) <= len(live):  # copying the cache pays once half the rows are gone
            run.keep(open_places)
            live[:] = [live[p] for p in open_places]
        gain = run.step()
        is_step = True


def room(target: Target, prompt: Sequence[int]) -> int:
    """New tokens that fit behind a prompt."""
    if len(prompt) >= target.max_positions:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens and {target.name} a context of {target.max_positions}: shorten it "
            f"to at most {target.max_positions - 1}"
        )
    return target.max_positions - len(prompt)
