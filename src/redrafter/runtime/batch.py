"""The running batch: rows open, their prompts are read in pieces, they step together and close, between any two steps.

`Engine.generate` opens all requests and steps until they are done, the server lets rows join and leave. All rows that
decode take part in each step, whether they draft or not; a flat pass also reads pieces of prompts. A closed row stays
until its place is needed, and a prompt that begins like any row copies that part instead of reading it.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.rules import Rule, make_rule
from redrafter.core.sampling import Processor, Sampling
from redrafter.core.step import Drafter
from redrafter.runtime.copied import Copied
from redrafter.runtime.eager import SCORED, EagerSteps, PackRows, together
from redrafter.runtime.flat_pass import AT_ONCE, MOST
from redrafter.runtime.guide import DEEPEST, recordable, row_processor
from redrafter.runtime.launched import Flight, Launched, Results, StepResult
from redrafter.runtime.prefixes import Prefixes
from redrafter.runtime.recorded import VISITED, RecordedSteps, records, sizes_up_to
from redrafter.runtime.room import check_room
from redrafter.runtime.row import Request, Row, RowOutput
from redrafter.runtime.state import BatchState
from redrafter.targets import Target
from redrafter.targets.cpu.packed_pass import own_pass


class Batch:
    """Room for `rows` open rows of `context` tokens, and for `kept` closed ones.

    past: most tokens that a row may copy from besides its own. shapes: all that steps will be asked for. rules: the
    acceptance rule for a shape, by default `seeded`. endings: most eos tokens of a request. runtime: "eager", "graphs"
    (recorded CUDA graphs), "compiled" or "auto" (recorded on a GPU, with the target's pass compiled). compiles_step:
    compile the rest of a recorded step too, for all rows at once only. recorded: for tests, fixed buffers on a CPU.
    one_size: every recorded step is of all rows.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rows: int,
        context: int,
        shapes: Sequence[Shape],
        rules: Callable[[Shape], Rule] | None = None,
        kept: int = 0,
        past: int = 0,
        endings: int = 1,
        runtime: str = "auto",
        compiles_step: bool = False,
        recorded: bool | None = None,
        one_size: bool = False,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rows, self.context = rows, min(context, target.max_positions)
        self.ahead, places = 1, rows + kept  # ahead: recorded steps that may be unread while the next one is launched
        rules = rules or (lambda shape: make_rule(RuleConfig(), shape, target.vocab_size, target.dtype))
        self.rule = functools.cache(rules)
        # A grammar may force tokens, and padding of a pass writes to the last slot.
        self.slack = max((max(self._nodes(s), DEEPEST) for s in shapes), default=0) + 2
        check_room(target, drafter, shapes, rows=rows, kept=kept, context=self.context, slack=self.slack)
        self.state = BatchState(target, drafter, places, self.context + self.slack, max(1, endings), past)
        self.steps: RecordedSteps | None = None
        verifies = own_pass(target)
        if records(target, runtime, recorded):
            from redrafter.targets.cuda.verifier import verifier  # here, for it imports much of transformers

            compiles = runtime in ("auto", "compiled")
            found = verifier(target, compiles)
            most = rows * (max([max(self._nodes(s), VISITED) for s in shapes], default=0) + 1)
            self.steps = RecordedSteps(found, drafter, self.state, self.rule, most, compiles_step=compiles_step)
            if found.same_bits is not False or compiles:  # a trial that comes later finds passes that keep its promise
                verifies = found
        self.eager = EagerSteps(verifies, drafter, self.state, self.rule, self.slack)
        self.sizes = [rows] if compiles_step or one_size else sizes_up_to(rows)
        self.at: list[Row | None] = [None] * places  # the row, open or closed, at each place
        self.prefixes = Prefixes(self.state)
        self.clock = self.version = 0
        self.samplings: dict[int, Sampling] = {}  # of this version
        self.flights: deque[Flight] = deque()
        self.collected = 0.0  # when the last results came

    def _nodes(self, shape: Shape) -> int:
        """KV cache slots behind a row that a step needs: for the nodes to verify and for those of the beam search."""
        return max(self.rule(shape).nodes, shape.width * shape.length)

    def fits(self, shape: Shape) -> bool:
        """Whether there is room for the trees of this shape."""
        return self._nodes(shape) < self.slack - 1

    @property
    def recorded(self) -> bool:
        return self.steps is not None

    @property
    def reads_in_steps(self) -> bool:
        """Whether prompts are read by the passes of steps, which `step` is given the pieces of."""
        return self.eager.reads_in_steps if self.steps is None else self.steps.passes is not None

    @property
    def free(self) -> int:
        """Rows that can be opened."""
        return self.rows - sum(row is not None and row.open for row in self.at)

    @property
    def used(self) -> int:
        """KV cache slots that open rows fill."""
        return sum(row.known for row in self.at if row is not None and row.open)

    @property
    def live(self) -> list[Row]:
        """The rows that decode."""
        return [row for row in self.at if row is not None and row.live]

    def stepping(self, pieces: Mapping[Row, int]) -> list[Row]:
        """The rows of the next step, if it reads these pieces: those that decode, and those that then begin."""
        return [row for row in self.at if row is not None and row.open and row.unread <= pieces.get(row, 0)]

    def open(
        self,
        request: Request,
        *,
        drafts: bool = True,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        reuses: bool = True,
        processor: Processor | None = None,
        past: Sequence[int] = (),
    ) -> Row:
        """A row to be read. Unless the row `reuses`, its whole prompt is read, whatever other rows have read.

        With `prompt_logprobs` the whole prompt is read too, and its tokens' log-probabilities are kept. past: tokens to
        look up n-grams in besides the row's own.
        """
        assert self.free > 0
        assert len(request.prompt) < self.context
        assert len(past) <= self.state.past
        closed = [p for p, row in enumerate(self.at) if row is None or not row.open]
        place = min(closed, key=lambda p: (0 if (row := self.at[p]) is None else row.used, p))
        row = Row(request, place, drafts=drafts, logprobs=logprobs, reuses=reuses, processor=processor, past=past)
        row.asks_prompt = prompt_logprobs
        self.prefixes.forget(self.at[place])
        self.at[place] = row
        self.state.rows.lengths[place].fill_(0)  # not `= 0`: torch would wait for all steps under way
        self._touch(row)
        self._changed()
        return row

    def reuse(self, row: Row) -> None:
        """Copy what any row has already read of this prompt."""
        if not row.reuses or row.asks_prompt is not None or not row.unread:
            return
        best, most = self.prefixes.source(self.at, row)
        if best is not None:
            self.prefixes.copy(best, row, most)
            row.reused += most - row.known
            self._read_to(row, most)
            self._touch(best)

    @torch.no_grad()
    def read(self, row: Row, most: int) -> None:
        """Read up to `most` more tokens of a prompt apart from steps."""
        self.reuse(row)
        scored = row.asks_prompt is not None
        piece = row.piece(self.prefixes.piece_size(row.known, min(most, row.unread, SCORED if scored else MOST)))
        if piece.tokens and scored:
            self.eager.score(row, piece)
        elif piece.tokens:
            self.eager.read([piece])
        self._read_to(row, row.known + len(piece.tokens))
        self.prefixes.after_piece(row)

    @torch.no_grad()
    def read_all(self, rows: Sequence[Row]) -> None:
        """Read the prompts of rows that were just opened, apart from steps, many in one pass."""
        if len(rows) == 1 or any(row.known for row in rows):
            for row in rows:
                while row.unread:
                    self.read(row, MOST)
            return
        for some in together([row for row in rows if row.unread], lambda row: row.unread):
            self.eager.read([row.piece(row.unread) for row in some])
            for row in some:
                self._read_to(row, row.unread)

    def _read_to(self, row: Row, known: int) -> None:
        row.known = known
        self.state.rows.lengths[row.place].fill_(known)
        self._touch(row)

    def places(self, rows: int) -> int:
        """Places of the recorded step that so many rows take."""
        return next(n for n in self.sizes if n >= rows)

    def pieces(self, most: int) -> dict[Row, int]:
        """Tokens to read of each prompt in the next step, `most` in all, for rows in the order of their opening."""
        waiting = [row for row in self.at if row is not None and row.open and not row.live and row.asks_prompt is None]
        found: dict[Row, int] = {}
        for row in sorted(waiting, key=lambda row: row.used):
            if most and row.unread and len(found) < AT_ONCE:
                found[row] = min(most, row.unread)
                most -= found[row]
        return found

    @torch.no_grad()
    def step(
        self,
        shape: Shape | None = None,
        *,
        count: int = 1,
        pieces: Mapping[Row, int] | None = None,
        copied: Mapping[Row, Copied] | None = None,
        pack: PackRows | None = None,
        budget: int | None = None,
    ) -> list[StepResult]:
        """Launch a step of all rows whose prompts are read, and read `pieces` of other prompts in the same pass.

        Without a shape, only what was `copied` is verified; a row's first step drafts nothing. `pack` chooses drafted
        nodes on a CPU; `budget`: of all rows of a recorded step (`RecordedSteps.budgets`). Returns what came: results
        of an eager or watched step, else of the launch before. A step that needs these is launched by the next call.
        """
        pieces = pieces or {}
        assert not pieces or self.reads_in_steps, "prompts are read apart from these steps"
        assert shape is None or self.fits(shape), "a tree would not fit behind a row at the end of its context"
        rows = self.stepping(pieces)
        assert rows or pieces, "no row to step"
        guessing = [row for row in rows if row.drafts and row.stepped] if shape is not None else []
        recorded, watched = self.steps is not None and all(map(recordable, rows)), any(row.watched for row in rows)
        behind = bool(guessing) and any(not flight.launched.follows for flight in self.flights)
        if self.flights and (behind or watched or not recorded):
            return self.drain()
        began = time.perf_counter()
        self.catch_up(guessing)
        size = self.places(len(rows)) if recorded else len(rows)
        self._gather(rows, size)
        fresh = [row for row in rows if not row.live]
        if fresh:  # their prompts are read
            self.state.admit(fresh, self.context)
            for row in fresh:
                row.live = True
            self._changed()
        first = [row for row in rows if not row.stepped]
        launched = self._launch(size, shape, guessing, first, count, pieces, watched, budget) if recorded else None
        eager = launched is None
        if launched is not None:
            for row, n in pieces.items():
                row.known += n
        else:
            if self.flights:  # an eager step needs to know how long the rows are
                for row in fresh:
                    self._halt(row)
                return self.drain()
            read = pieces if rows and self.eager.reads_in_steps else {}
            for row, n in ({} if read else pieces).items():
                self.read(row, n)
            if not rows:
                return []
            self._gather(rows, len(rows))
            launched = self.eager.launch(rows, shape, guessing, copied, pack, self.sampling(len(rows)), watched, read)
        begun = guessing if eager else [row for row in rows if row.drafts]
        for row in rows:
            row.stepped = True
        self.flights.append(
            Flight(
                launched,
                shape if guessing else None,
                [(row, row.place) for row in rows],
                count,
                began + launched.recording,
                sum(pieces.values()),
                set(first),
                set(begun) if launched.follows else set(),
            )
        )
        return [self._collect() for _ in range(len(self.flights) - (self.ahead if launched.late else 0))]

    def _launch(
        self,
        size: int,
        shape: Shape | None,
        guessing: list[Row],
        first: list[Row],
        count: int,
        pieces: Mapping[Row, int],
        watched: bool,
        budget: int | None,
    ) -> Launched | None:
        """Recorded steps; None if they cannot be recorded. A drafter that follows begins with rows' first steps."""
        assert self.steps is not None
        begins = [row for row in first if row.drafts] if shape is not None else []
        follows = bool(guessing or begins)
        if follows:
            self.state.allocate(self.drafter)
        sampling = self.sampling(size)
        kind = self.steps.kind(size, shape if guessing else None, follows, sampling, watched, budget is not None)
        parts = [row.piece(n) for row, n in pieces.items()]

        def begin() -> None:
            for some in together(begins, lambda row: len(row.request.prompt)):
                self.state.begin(self.drafter, some)

        guesses = [row in guessing for row in self.at[:size]]
        return self.steps.launch(kind, sampling, self.version, count, parts, guesses, begin, budget)

    def drain(self) -> list[StepResult]:
        """Wait for all launched steps."""
        return [self._collect() for _ in range(len(self.flights))]

    def _collect(self) -> StepResult:
        flight = self.flights.popleft()
        results = flight.launched.results()
        now = time.perf_counter()
        seconds, self.collected = now - max(flight.began, self.collected), now
        gained = ((row, self._output(flight, results, row, place)) for row, place in flight.rows if row.open)
        return flight.result(list(gained), seconds)

    def _output(self, flight: Flight, results: Results, row: Row, place: int) -> RowOutput:
        output = flight.launched.output(results, place, row)
        row.ids += output.tokens
        row.known += len(output.tokens)
        if row in flight.begun:
            row.seen = len(row.ids)
        if row in flight.first:
            output.steps -= 1
            output.prompt_logprobs = row.prompt_logprobs if row.asks_prompt is not None else None
        return output

    def close(self, row: Row) -> None:
        """Free the row at once; what it has read stays for others until its place is needed."""
        if row.open:
            row.open, row.processor = False, None
            self._halt(row)

    def _halt(self, row: Row) -> None:
        """Steps leave the row alone from now on."""
        row.live = False
        self.state.rows.done[row.place].fill_(True)
        self._read_to(row, row.known)
        self._changed()

    def reset(self) -> None:
        """After a step that failed as a whole: no row is open any more, none is kept."""
        self.flights.clear()
        for row in filter(None, self.at):
            row.open = row.live = False
        self.at = [None] * len(self.at)
        self.prefixes = Prefixes(self.state)
        self.state.rows.done.fill_(True)
        self.state.rows.lengths.fill_(0)
        self._changed()

    def _gather(self, rows: list[Row], size: int) -> None:
        """Move these rows, and no other live row, into the first places."""
        if outside := [row.place for row in rows if row.place >= size]:
            inside = set(rows)
            room = [place for place in range(size) if self.at[place] not in inside]
            for a, b in zip(outside, room, strict=False):
                self._swap(a, b)

    def _swap(self, a: int, b: int) -> None:
        rows = (self.at[a], self.at[b])
        unread = sum(flight.launched.width * flight.count for flight in self.flights)  # tokens a row may have gained
        length = max((row.known + unread + 1 for row in rows if row is not None), default=0)
        self.state.swap(a, b, min(length, self.state.slots))
        self.at[a], self.at[b] = self.at[b], self.at[a]
        for place in (a, b):
            if (row := self.at[place]) is not None:
                row.place = place
        self._changed()

    @torch.no_grad()
    def catch_up(self, rows: Sequence[Row]) -> None:
        """Let the drafter take in what it does not know yet of these rows' texts."""
        for some in together([row for row in rows if not row.seen], lambda row: row.known):
            self.state.begin(self.drafter, some)
        self.state.catch_up(self.drafter, rows)

    def _touch(self, row: Row) -> None:
        self.clock += 1
        row.used = self.clock

    def _changed(self) -> None:
        self.version += 1
        self.samplings.clear()

    def sampling(self, size: int) -> Sampling:
        """Of the live rows at the first places; the others choose greedily, and nobody reads their tokens."""
        if size not in self.samplings:
            rows = [row if row is not None and row.live else None for row in self.at[:size]]
            every = [SamplingParams() if row is None else row.request.sampling for row in rows]
            sampling = Sampling.of(every, self.target.vocab_size, self.target.device)
            self.samplings[size] = replace(sampling, processor=row_processor(rows, self.slack - 2))
        return self.samplings[size]
