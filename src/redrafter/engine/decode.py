"""Requests in, text out: open all requests in the running batch, step until they are done."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redrafter.config import RuleConfig
from redrafter.core.sampling import Processor
from redrafter.engine.exactness import Promise
from redrafter.engine.processors import PathProcessors
from redrafter.engine.request import FinishReason, Part, Request, Stats
from redrafter.engine.text import TextWriter
from redrafter.errors import ConfigError
from redrafter.planning.steps import Steps
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import AT_ONCE, MOST
from redrafter.runtime.guide import Constraint
from redrafter.runtime.row import Row, RowOutput


class RequestWriter:
    """Turns what passes give a request's row into text and statistics."""

    def __init__(self, index: int, request: Request, rule: RuleConfig, tokenizer: Any, promise: Promise) -> None:
        self.index, self.request = index, request
        self.ids = [*request.pads, *request.prompt]
        self.text = TextWriter(tokenizer, request.stop, request.shown)
        self.stats = Stats(rule=rule.name, lossless=rule.lossless, exactness=promise.exactness)
        self.finish_reason: FinishReason | None = None
        self.forbidden = {token for token, bias in request.sampling.logit_bias.items() if bias == -math.inf}
        self.checks: list[Callable[[], None]] = []  # each raises if a token was chosen where none was left

    def take(self, output: RowOutput, elapsed: float) -> Part:
        """Take new tokens, up to where a stop string or a stopping criterion ends the text."""
        pieces: list[str] = []
        for token in output.tokens:
            self.ids.append(token)
            stopped = self.text.add(token)
            pieces.append(self.text.take())
            if stopped or (self.request.halts is not None and self.request.halts(self.ids)):
                self.finish_reason = "stop"
                break
        kept = len(pieces)
        self._check(output.tokens[:kept])
        if output.done and self.finish_reason is None:
            ended = bool(output.tokens) and output.tokens[-1] in self.request.eos
            self.finish_reason = "stop" if ended else "length"
        accepted = min(kept, output.drafted)
        stats = self.stats
        stats.steps += output.steps
        stats.tokens += kept
        stats.seconds = elapsed
        if output.steps:
            stats.nodes += output.nodes
            stats.expected += output.expected
            stats.plain_steps += 0 if output.nodes else output.steps
            stats.accepted += accepted
            stats.accepted_per_step.append(accepted)
        else:
            stats.first_token_seconds = elapsed
        rest = self.text.take(final=True) if self.finish_reason is not None else ""
        if pieces:
            pieces[-1] += rest
        text = "".join(pieces) if pieces else rest
        return Part(self.index, text, output.tokens[:kept], accepted, stats, self.finish_reason, pieces)

    def processor(self, processors: Sequence[Any]) -> Processor | None:
        """A user's logits processors and the request's grammar, each node seeing its own path."""
        users = PathProcessors(processors, lambda: self.ids) if processors else None
        if users is not None:
            self.checks.append(users.dead_ends.check)
        constraint: Constraint | None = self.request.constraint
        if constraint is None:
            return users
        guide = constraint.guide(lambda: self.ids, users)
        self.checks.append(guide.check)
        return guide

    def _check(self, tokens: Sequence[int]) -> None:
        """Raise ConfigError if these new tokens were chosen though no token could be."""
        for check in self.checks:
            check()
        for count, token in enumerate(tokens):
            if token in self.forbidden:
                cause = "logit_bias leaves" if self.request.constraint is None else "the grammar and logit_bias leave"
                raise ConfigError(f"{cause} no token to choose at token {self.stats.tokens + count + 1} of the text")


def decode(
    batch: Batch,
    requests: Sequence[Request],
    rule: RuleConfig,
    processors: Sequence[Any],
    rows: int,
    promise: Promise,
    policy: Steps,
) -> Iterator[list[Part]]:
    """One list of parts per pass. At most `rows` requests are written at once; a freed row takes the next request."""
    waiting = deque(enumerate(requests))
    writers: dict[Row, RequestWriter] = {}
    opened: dict[Row, float] = {}
    elapsed, began = 0.0, time.perf_counter()
    while waiting or writers:
        fresh = []
        while waiting and len(writers) < rows:
            index, request = waiting.popleft()
            writer = RequestWriter(index, request, rule, batch.target.tokenizer, promise)
            row = batch.open(request, reuses=False, processor=writer.processor(processors))
            writers[row], opened[row] = writer, elapsed
            fresh.append(row)
        if not batch.reads_in_steps or len(fresh) > AT_ONCE:
            batch.read_all(fresh)
        pieces = batch.pieces(MOST) if batch.reads_in_steps else {}
        results = policy.step(batch, list(writers), pieces)
        outputs = [found for result in results for found in result.rows]  # of recorded steps, the one before
        elapsed += time.perf_counter() - began
        parts = []
        for row, output in outputs:
            if row not in writers:  # finished by an earlier step of the same results
                continue
            if output.error is not None:
                raise output.error
            part = writers[row].take(output, elapsed - opened[row])
            parts.append(part)
            if not output.steps:
                policy.open(row)
            if part.finish_reason is not None:
                batch.close(row)
                policy.close(row)
                del writers[row], opened[row]
        if parts:
            yield sorted(parts, key=lambda part: part.row)
        began = time.perf_counter()
