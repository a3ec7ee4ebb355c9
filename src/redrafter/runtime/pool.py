"""A batch that never ends: rows join, are read piece by piece, step together, and leave, between any two steps.

Rows that draft stand at the lower places of the table, rows that want plain decoding at the upper ones, so that each
kind is one view. What a closed row leaves behind is kept until its place is needed: a prompt that begins like any row,
open or closed, takes that part over. On a GPU a step is a recorded `Program` over the next power of two.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.noise import as_int64
from redrafter.core.rules import Rule, make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.runtime.compiled import verifier
from redrafter.runtime.eager import Start, first_tokens
from redrafter.runtime.program import NotRecordable, Program
from redrafter.runtime.reader import PIECES, Reader
from redrafter.runtime.recorder import BUCKETS, Recorder, columns
from redrafter.runtime.row import Row, Written, common, each_its_own, logprobs_of
from redrafter.runtime.table import Table, Watched, store, told_step
from redrafter.targets import Target
from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)

WORTH = 8
"""Tokens that must be spared to copy them from another row."""


class Pool:
    """Room for `rows` open rows of `context` tokens, and for `kept` closed ones."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rows: int,
        context: int,
        shapes: Sequence[Shape],
        kept: int = 4,
        endings: int = 1,
        runtime: str = "auto",
        recorded: bool | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rows, self.context = rows, min(context, target.max_positions)
        self.slack = max([s.budget for s in shapes], default=0) + 1
        self.compiles = runtime in ("auto", "compiled")
        self.recorded = (target.device.type == "cuda" and runtime != "eager") if recorded is None else recorded
        try:
            self.table = Table(target, drafter, rows + kept, self.context + self.slack, max(1, endings))
        except NotRecordable as error:
            raise ConfigError(
                f"the drafter {getattr(drafter, 'name', type(drafter).__name__)!r} cannot join a running batch "
                f"({error}); serve with a drafter of ours, 'ngram' or 'none'"
            ) from error
        self.at: list[Row | None] = [None] * (rows + kept)  # who stands or stood at each place
        self.live = {True: 0, False: 0}  # rows that step, by whether they draft
        self.plain = NoDrafter()
        self.clock = self.version = 0
        self.recorder = Recorder(target, self.table, self.compiles)
        self.reader = self._reader()
        self.samplings: dict[tuple[int, int], Sampling] = {}  # of this version
        self.rules: dict[Shape | None, Rule] = {}
        self.flight: _Flight | None = None

    @property
    def free(self) -> int:
        """Rows that can be opened."""
        return self.rows - sum(row is not None and row.open for row in self.at)

    @property
    def used(self) -> int:
        """Cache slots that open rows fill."""
        return sum(row.known for row in self.at if row is not None and row.open)

    def open(
        self,
        start: Start,
        params: SamplingParams,
        *,
        drafts: bool = True,
        logprobs: int | None = None,
        reuses: bool = True,
    ) -> Row:
        """A row to be read; prompt and budget fit into the context. Unless it `reuses`, all of its prompt is read."""
        assert self.free > 0
        assert len(start.prompt) + start.budget <= self.context
        closed = [p for p, row in enumerate(self.at) if row is None or not row.open]
        place = min(closed, key=lambda p: (0 if (row := self.at[p]) is None else row.used, p))
        row = self.at[place] = Row(start, params, drafts, logprobs, place)
        row.reuses = reuses
        self.table.rows.lengths[place] = 0
        self._touch(row)
        return row

    @torch.no_grad()
    def read(self, row: Row, most: int) -> Written | None:
        """Up to `most` more tokens of the prompt; with its end comes the first new token."""
        if row.reuses:
            self._reuse(row)
        prompt = len(row.start.prompt)
        begin, stop = row.known, min(prompt, row.known + min(most, PIECES[-1]))
        found = self.reader.read(row.place, row.ids[begin:stop], begin) if self.reader is not None else None
        if found is None:
            part = self.table.cache.part(row.place, row.place + 1)
            found = self.target.prefill(self._tokens(row, stop), [stop], part, self.drafter.layers, begin=begin)
        logits, hidden = found
        self.table.history[row.place, begin:stop] = hidden[0]
        row.known = stop
        self.table.rows.lengths[row.place] = stop
        self._touch(row)
        return self._first(row, self._tokens(row, stop), logits) if stop == prompt else None

    def _tokens(self, row: Row, stop: int) -> Tensor:
        return torch.tensor([row.ids[:stop]], device=self.target.device)

    def _reader(self) -> Reader | None:
        """Recorded passes, where steps are recorded and the tree kernel does the model's attention."""
        made = verifier(self.target, self.compiles) if self.recorded else None
        if not isinstance(made, TreeTarget):
            return None
        return Reader(made, self.table.cache, self.drafter.layers)

    def _first(self, row: Row, prompt: Tensor, logits: Tensor) -> Written:
        """The row takes its place among those that step."""
        n = self.live[row.drafts]
        self._swap(row.place, n if row.drafts else len(self.at) - 1 - n)
        self.live[row.drafts] += 1
        row.live = True
        place, start, table = row.place, row.start, self.table
        rows = table.rows
        rows.lengths[place] = len(start.prompt) - 1
        rows.last[place] = start.prompt[-1]
        rows.seeds[place] = as_int64(start.seed)
        rows.remaining[place] = start.budget
        rows.done[place] = False
        rows.eos[place] = -1
        for i, token in enumerate(start.eos):
            rows.eos[place, i] = token
        sampling = self._sampling(place, place + 1)
        if sampling.penalises and rows.counts is not None:
            rows.counts[place] = torch.bincount(prompt[0], minlength=rows.counts.shape[1])
        mine = table.view(place, place + 1, drafts=row.drafts, counted=sampling.penalises)
        drafter = self._watched(mine, place, place + 1, row.drafts, None, follows=True)
        hidden = table.history[place : place + 1, : len(start.prompt)]
        begun = replace(
            mine, state=drafter.begin(prompt, mine.lengths + 1, hidden, table.slots) if row.drafts else None
        )
        part = table.cache.part(place, place + 1)
        new, accepted = first_tokens(begun, part, sampling, self._rule(None), drafter, logits, hidden)
        store(mine, new)
        count, done = int(accepted.count), bool(new.done)
        tokens = accepted.tokens[0, :count].tolist()
        row.ids += tokens
        row.seen = len(row.ids)
        found = None if row.logprobs is None else logprobs_of(logits[:count], tokens, row.logprobs)
        return Written(tokens, done=done, logprobs=found, error=row.error)

    @torch.no_grad()
    def launch(self, drafts: bool, shape: Shape | None) -> None:
        """Begin a step of all rows that draft, or of all that do not; without a shape nothing is guessed."""
        assert self.flight is None
        assert shape is None or shape.budget < self.slack, "a tree would not fit behind a row at its context's end"
        n, places = self.live[drafts], len(self.at)
        mine = [row for row in self.at if row is not None and row.live and row.drafts == drafts]
        mine.sort(key=lambda row: row.place)
        if drafts and shape is not None:
            self._catch_up(mine)
        watched = any(row.logprobs is not None or row.processor is not None for row in mine)
        if self.recorded and not watched:
            size = min(next((b for b in BUCKETS if b >= n), n), places)
            start, stop = (0, size) if drafts else (places - size, places)
            if size + self.live[not drafts] <= places:
                program = self.recorder.program(
                    start,
                    stop,
                    shape,
                    self._rule(shape),
                    self._sampling(start, stop),
                    self.version,
                    lambda rows: self._watched(rows, start, stop, drafts, shape),
                    drafts,
                )
                if program is not None:
                    program.launch()
                    self.flight = _Flight(mine, start, program, program.drafter, None, None)  # type: ignore[arg-type]
                    return
        start, stop = (0, n) if drafts else (places - n, places)
        self.flight = self._step(mine, start, stop, drafts, shape)

    def _catch_up(self, rows: list[Row]) -> None:
        """Steps without a guess leave the drafter behind: what it then does not do costs nothing."""
        for behind in {len(row.ids) - row.seen for row in rows} - {0}:
            late = [row for row in rows if len(row.ids) - row.seen == behind]
            new = [row.ids[row.seen :] for row in late]
            self.table.follow(self.drafter, [row.place for row in late], new, [row.seen for row in late])
            for row in late:
                row.seen = len(row.ids)

    def _step(self, mine: list[Row], start: int, stop: int, drafts: bool, shape: Shape | None) -> "_Flight":
        """Launched one by one, over just these rows."""
        sampling, rule = self._sampling(start, stop), self._rule(shape)
        rows = self.table.view(start, stop, drafts=drafts, counted=sampling.penalises)
        drafter = self._watched(rows, start, stop, drafts, shape)
        part = self.table.cache.part(start, stop)
        part.extent = max(row.known for row in mine) + 1 + (rule.nodes if shape else 0)
        out = rows.last.new_zeros(stop - start, columns(shape))
        target = _Heard(self.target)
        told_step(rows, out, part, sampling, rule, drafter, target)
        logits = target.logits if any(row.logprobs is not None for row in mine) else None
        return _Flight(mine, start, None, drafter, out, logits)

    def collect(self) -> list[tuple[Row, Written]]:
        """What the step gave each of its rows; waits for it."""
        flight = self.flight
        assert flight is not None
        self.flight = None
        told = flight.program.tell() if flight.program is not None else flight.out.tolist()  # type: ignore[union-attr]
        return [(row, self._written(row, told[row.place - flight.start], flight)) for row in flight.rows]

    def _written(self, row: Row, told: list[int], flight: "_Flight") -> Written:
        width, size = flight.drafter.widths
        count, drafted, done, nodes = told[:4]
        cuts = (4, 4 + width, 4 + 2 * width, 4 + 2 * width + size, 4 + 2 * width + 2 * size)
        tokens, path, tree, parents = (told[a:b] for a, b in itertools.pairwise(cuts))
        tokens = tokens[:count]
        row.ids += tokens
        row.known += count
        if flight.drafter.follows:
            row.seen = len(row.ids)
        found = None
        if row.logprobs is not None and flight.logits is not None:
            found = logprobs_of(flight.logits[row.place - flight.start][path[:count]], tokens, row.logprobs)
        kept = min(count, drafted)
        shown = (tree[: nodes + 1], parents[: nodes + 1], path[: kept + 1])
        return Written(tokens, kept, bool(done), nodes, shown, found, row.error)

    def close(self, row: Row) -> None:
        """Free the row at once, wherever it is; what it has read stays for others until its place is needed."""
        assert self.flight is None
        if not row.open:
            return
        if row.live:
            self.live[row.drafts] -= 1
            n = self.live[row.drafts]
            self._swap(row.place, n if row.drafts else len(self.at) - 1 - n)
        row.open = row.live = False
        row.processor = None
        self.table.rows.done[row.place] = True
        self.table.rows.lengths[row.place] = row.known
        self._touch(row)

    def reset(self) -> None:
        """After a step that failed as a whole: no row is open any more, none is kept."""
        self.flight = None
        for row in self.at:
            if row is not None:
                row.open = row.live = False
        self.at = [None] * len(self.at)
        self.live = {True: 0, False: 0}
        self.table.rows.done.fill_(True)
        self.table.rows.lengths.fill_(0)
        self._changed()

    def _swap(self, a: int, b: int) -> None:
        rows = (self.at[a], self.at[b])
        self.table.swap(a, b, max((row.known + 1 for row in rows if row is not None), default=0))
        self.at[a], self.at[b] = self.at[b], self.at[a]
        for place in (a, b):
            if (row := self.at[place]) is not None:
                row.place = place
        self._changed()

    def _touch(self, row: Row) -> None:
        self.clock += 1
        row.used = self.clock
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.samplings.clear()

    def _reuse(self, row: Row) -> None:
        """Take over what any row has already read of this prompt; its last token is always read, for its logits."""
        wanted = row.ids[: len(row.start.prompt) - 1]
        best, most = None, row.known + WORTH - 1
        for other in self.at:
            if other is not None and other is not row and (n := common(other.ids[: other.shared], wanted)) > most:
                best, most = other, n
        if best is not None:
            self.table.copy(best.place, row.place, row.known, most)
            row.reused += most - row.known
            row.known = most
            self._touch(best)

    def _rule(self, shape: Shape | None) -> Rule:
        if shape not in self.rules:
            self.rules[shape] = make_rule(
                RuleConfig(), shape or self.plain.default_shape, self.target.vocab_size, self.target.dtype
            )
        return self.rules[shape]

    def _watched(
        self, rows: Any, start: int, stop: int, drafts: bool, shape: Shape | None, follows: bool = False
    ) -> Watched:
        drafter: Drafter = self.drafter if drafts else self.plain
        history, guesses = self.table.history[start:stop], drafts and shape is not None
        made = Watched(drafter, rows, history, guesses=guesses, follows=guesses or follows, trims=not self.recorded)
        if self.recorded:  # one compiled pass for both kinds of rows; hidden states cost it next to nothing
            made.layers = self.drafter.layers
        return made

    def _sampling(self, start: int, stop: int) -> Sampling:
        """Of the live rows among these; the others choose greedily, and nobody looks."""
        if (start, stop) not in self.samplings:
            rows = [row if row is not None and row.live else None for row in self.at[start:stop]]
            every = [SamplingParams() if row is None else row.params for row in rows]
            sampling = Sampling.of(every, self.target.vocab_size, self.target.device)
            if any(row is not None and row.processor is not None for row in rows):
                sampling = replace(sampling, processor=each_its_own(rows))
            self.samplings[start, stop] = sampling
        return self.samplings[start, stop]


@dataclass(frozen=True)
class _Flight:
    """A step under way."""

    rows: list[Row]
    start: int
    program: Program | None
    drafter: Watched
    out: Tensor | None
    logits: Tensor | None


class _Heard:
    """The target, with the logits of its last pass at hand."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.logits: Tensor | None = None

    def verify(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.logits, hidden = self.target.verify(*arguments)
        return self.logits, hidden
