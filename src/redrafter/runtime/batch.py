"""The running batch: rows open, are read in pieces, step together and close, between any two steps.

`Engine.generate` opens all requests and steps until they are done, the server lets rows join and leave. Recorded rows
that draft have the lower places, those that do not the upper ones: each kind is one view of the tensors. A closed row
stays until its place is needed, and a prompt that begins like any row copies that part instead of reading it.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.noise import as_int64
from redrafter.core.rules import Rule, make_rule
from redrafter.core.sampling import Processor, Sampling
from redrafter.core.step import Drafter, Rows, first_tokens
from redrafter.drafters import NoDrafter
from redrafter.drafters.copied import Copied
from redrafter.runtime.executor import Executor, Results, sizes_up_to
from redrafter.runtime.flight import Flight, Kind, StepResult
from redrafter.runtime.guide import DEEPEST, recordable, row_processor
from redrafter.runtime.places import arrange, first_place
from redrafter.runtime.prefill import PIECES, SCORED, PromptReader, prefill, score, together
from redrafter.runtime.room import check_room
from redrafter.runtime.row import Request, Row, RowOutput, best_source, logprobs_of, padded
from redrafter.runtime.state import BatchState
from redrafter.targets import Target


class Batch:
    """Room for `rows` open rows of `context` tokens, and for `kept` closed ones.

    past: most tokens that a row may copy from besides its own. shapes: all that steps will be asked for. rules: the
    acceptance rule for a shape, by default `seeded`. endings: most eos tokens of a request. runtime: "eager", "graphs"
    (recorded CUDA graphs), "compiled" or "auto" (recorded on a GPU, with the target's pass compiled). compiles_step:
    compile the rest of a recorded step too, for all rows at once only. recorded: for tests, fixed buffers on a CPU.
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
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rows, self.context = rows, min(context, target.max_positions)
        compiles = runtime in ("auto", "compiled")
        on_gpu = target.device.type == "cuda"
        recorded = (on_gpu and runtime != "eager") if recorded is None else recorded
        self.ahead, places = 1, rows + kept  # ahead: recorded steps that may be unread while the next one is launched
        rules = rules or (lambda shape: make_rule(RuleConfig(), shape, target.vocab_size, target.dtype))
        self.rules = functools.cache(rules)
        self.slack = max((max(self._nodes(s), DEEPEST) for s in shapes), default=0) + 1  # a grammar may force tokens
        check_room(target, drafter, shapes, rows=rows, kept=kept, context=self.context, slack=self.slack)
        self.state = BatchState(target, drafter, places, self.context + self.slack, max(1, endings), past)
        self.executor = Executor(
            target, drafter, self.state, rules, recorded=recorded, compiles=compiles, compiles_step=compiles_step
        )
        self.sizes = [rows] if compiles_step else sizes_up_to(rows)
        self.reader = None
        if not isinstance(self.executor.verifier, Target):
            self.reader = PromptReader(self.executor.verifier, self.state.cache, drafter.layers)
        self.at: list[Row | None] = [None] * places  # the row, open or closed, at each place
        self.plain = NoDrafter()
        self.clock = self.version = 0
        self.samplings: dict[tuple[int, int], Sampling] = {}  # of this version
        self.flights: deque[Flight] = deque()
        self.collected = 0.0  # when the last results came

    def _nodes(self, shape: Shape) -> int:
        """KV cache slots behind a row that a step needs: for the nodes to verify and for those of the beam search."""
        return max(self.rules(shape).nodes, shape.width * shape.length)

    def fits(self, shape: Shape) -> bool:
        """Whether there is room for the trees of this shape."""
        return self._nodes(shape) < self.slack

    @property
    def recorded(self) -> bool:
        return self.executor.recorded

    @property
    def free(self) -> int:
        """Rows that can be opened."""
        return self.rows - sum(row is not None and row.open for row in self.at)

    @property
    def used(self) -> int:
        """KV cache slots that open rows fill."""
        return sum(row.known for row in self.at if row is not None and row.open)

    @property
    def live(self) -> dict[bool, int]:
        """Rows that step, by whether they draft."""
        return {drafts: len(self._live(Kind(drafts))) for drafts in (True, False)}

    @property
    def kinds(self) -> dict[Kind, int]:
        """What steps can be launched for, and how many rows each has. If recorded, watched rows step apart."""
        found, every = {}, sum(self.live.values())
        for drafts in (True, False):
            free = len(self._live(Kind(drafts, watched=False)))
            apart = self.recorded and free and self.recorded_places(free) + every - free <= len(self.at)
            for kind in (Kind(drafts, watched=True), Kind(drafts, watched=False)) if apart else (Kind(drafts),):
                found[kind] = len(self._live(kind))
        return {kind: rows for kind, rows in found.items() if rows}

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
        self.at[place] = row
        self.state.rows.lengths[place].fill_(0)  # not `= 0`: torch would wait for all steps under way
        self._touch(row)
        return row

    @torch.no_grad()
    def read(self, row: Row, most: int) -> RowOutput | None:
        """Read up to `most` more tokens of the prompt; with its end comes the first new token."""
        scored = row.asks_prompt is not None
        if row.reuses and not scored:
            self._reuse(row)
        prompt = len(row.request.prompt)
        begin, stop = row.known, min(prompt, row.known + min(most, SCORED if scored else PIECES[-1]))
        found = None
        if scored:
            found = score(self.executor.unrecorded, self.state.cache, row, begin, stop, self.drafter.layers)
        elif self.reader is not None:
            found = self.reader.read(row.place, row.ids[begin:stop], begin)
        if found is None:
            found = self._prefill(torch.tensor([row.ids[:stop]], device=self.target.device), [stop], [row], begin)
        logits, hidden = found
        self.state.history[row.place, begin:stop] = hidden[0]
        row.known = stop
        self.state.rows.lengths[row.place].fill_(stop)
        self._touch(row)
        return self._begin([row], logits)[0] if stop == prompt else None

    @torch.no_grad()
    def read_all(self, rows: Sequence[Row]) -> list[tuple[Row, RowOutput]]:
        """Read the whole prompts of rows that were just opened, many in one pass; all draft or none does."""
        if len(rows) == 1 or any(row.known for row in rows):
            return [(row, self._read_to_the_end(row)) for row in rows]
        parts = together(rows, lambda row: len(row.request.prompt))
        return [pair for some in parts for pair in zip(some, self._read_together(some), strict=True)]

    def _read_to_the_end(self, row: Row) -> RowOutput:
        while (output := self.read(row, PIECES[-1])) is None:
            pass
        return output

    def _read_together(self, rows: list[Row]) -> list[RowOutput]:
        lengths = [len(row.request.prompt) for row in rows]
        tokens, at = padded([row.request.prompt for row in rows], self.target.device), self._places(rows)
        logits, hidden = self._prefill(tokens, lengths, rows, 0)
        if hidden.shape[2]:
            self.state.history[at, : tokens.shape[1]] = hidden
        for row in rows:
            row.known = len(row.request.prompt)
            self._touch(row)
        return self._begin(rows, logits)

    def _prefill(self, tokens: Tensor, lengths: list[int], rows: list[Row], begin: int) -> tuple[Tensor, Tensor]:
        """A pass over prompts that no recorded pass reads."""
        reads, verifier = self.executor.unrecorded, self.executor.verifier
        if len(rows) > 1 and not isinstance(verifier, Target) and verifier.compiles:
            reads = verifier
        places = [row.place for row in rows]
        return prefill(reads, self.state.cache, tokens, lengths, places, self.drafter.layers, begin)

    def _begin(self, rows: list[Row], logits: Tensor) -> list[RowOutput]:
        """Rows whose prompts are read choose their first tokens, from logits (n, V), and take part in steps."""
        device, state, drafts = self.target.device, self.state, rows[0].drafts
        requests = [row.request for row in rows]
        prompts = padded([r.prompt for r in requests], device)  # (n, P)
        lengths = torch.tensor([len(r.prompt) for r in requests], device=device)
        budgets = [min(r.max_new_tokens, self.context - len(r.prompt)) for r in requests]
        endings = state.rows.eos.shape[1]
        sampling = Sampling.of([r.sampling for r in requests], self.target.vocab_size, device)
        sampling = replace(sampling, processor=row_processor(rows))
        counts = None
        if sampling.penalises:
            real = torch.arange(prompts.shape[1], device=device) < lengths[:, None]
            counts = torch.zeros(len(rows), self.target.vocab_size, device=device)
            counts.scatter_add_(1, prompts, real.float())
        at = self._places(rows)
        hidden = state.history[at, : prompts.shape[1]]  # (n, P, C)
        begins = drafts and self.recorded  # else with the first draft: under load there may be none
        drafter: Drafter = self.drafter if begins else self.plain
        fresh = Rows(
            lengths=lengths - 1,
            last=prompts.gather(1, lengths[:, None] - 1)[:, 0],
            seeds=torch.tensor([as_int64(r.seed) for r in requests], device=device),
            remaining=torch.tensor(budgets, device=device),
            done=torch.zeros(len(rows), dtype=torch.bool, device=device),
            eos=torch.tensor([[*r.eos, *[-1] * (endings - len(r.eos))] for r in requests], device=device),
            counts=counts,
            state=state.begun(drafter, rows, prompts, lengths, hidden),
        )
        new, accepted = first_tokens(fresh, sampling, self.executor.rule(None), drafter, logits, hidden)
        state.put(at, new)
        outputs = []
        tokens, taken, done = accepted.tokens[:, 0].tolist(), accepted.count.tolist(), new.done.tolist()
        for i, row in enumerate(rows):
            gained = [tokens[i]][: taken[i]]
            row.ids += gained
            row.seen, row.live = len(row.ids) if begins else 0, True
            found = None if row.logprobs is None else logprobs_of(logits[i : i + 1], gained, row.logprobs)
            heard = row.prompt_logprobs if row.asks_prompt is not None else None
            outputs.append(RowOutput(gained, done=done[i], logprobs=found, prompt_logprobs=heard, error=row.error))
        self._changed()
        return outputs

    @torch.no_grad()
    def step(
        self,
        drafts: bool = True,
        shape: Shape | None = None,
        count: int = 1,
        watched: bool | None = None,
        copied: Mapping[Row, Copied] | None = None,
    ) -> list[StepResult]:
        """Launch a step of one kind of rows. Without a shape, nothing but what was `copied` for rows is verified.

        Returns the results that have come: an eager or watched step's own; of other steps those of the launch before.
        A step that needs these results to be known is launched by the next call.
        """
        rows = self._live(kind := Kind(drafts, watched))
        assert rows, "no row to step"
        assert shape is None or self.fits(shape), "a tree would not fit behind a row at the end of its context"
        recorded, size = self.recorded and all(map(recordable, rows)), self.recorded_places(len(rows))
        if recorded:
            recorded = size + sum(self.live.values()) - len(rows) <= len(self.at)
        guesses, heard = drafts and shape is not None, any(row.watched for row in rows)
        behind = guesses and any(f.kind.drafts and not f.launched.follows for f in self.flights)
        if self.flights and (behind or heard or not recorded):
            return self.drain()
        began, launched = time.perf_counter(), None
        if guesses:
            self.catch_up(rows)
        if recorded:
            beside = self.recorded_places(len(self._live(Kind(drafts, watched=False)))) if watched else 0
            start, stop = self._gather(rows, size, first_place(len(self.at), size, drafts, beside))
            sampling = self._sampling(start, stop)
            launched = self.executor.launch(start, stop, drafts, shape, sampling, self.version, count, heard)
        if launched is None:
            if self.flights:  # an eager step needs to know how long the rows are
                return self.drain()
            start, stop = self._gather(rows, len(rows))
            guided = any(row.processor is not None for row in rows)  # a guide may plant as many nodes as fit
            chains = [copied.get(row, Copied()) for row in sorted(rows, key=lambda r: r.place)] if copied else None
            drafted = self.slack - 1 if guided else self.executor.rule(shape).nodes
            nodes = drafted if guesses else max((len(chain.tokens) for chain in chains or ()), default=0)
            assert nodes < self.slack, "a chain would not fit behind a row"
            extent = max(row.known for row in rows) + 1 + nodes
            launched = self.executor.run(start, stop, drafts, shape, self._sampling(start, stop), extent, heard, chains)
        lines, began = [(row, row.place - start) for row in rows], began + launched.recording
        self.flights.append(Flight(launched, kind, shape, lines, count, began))
        unread = self.ahead if launched.late else 0
        return [self._collect() for _ in range(len(self.flights) - unread)]

    def drain(self) -> list[StepResult]:
        """Wait for all launched steps."""
        return [self._collect() for _ in range(len(self.flights))]

    def _collect(self) -> StepResult:
        flight = self.flights.popleft()
        results = flight.launched.results()
        now = time.perf_counter()
        seconds, self.collected = now - max(flight.began, self.collected), now
        rows = [(row, self._output(row, line, results, flight)) for row, line in flight.rows if row.open]
        return StepResult(flight.kind, flight.shape, rows, len(flight.rows), seconds)

    def _output(self, row: Row, line: int, results: Results, flight: Flight) -> RowOutput:
        output = flight.launched.output(results, line, row)
        row.ids += output.tokens
        row.known += len(output.tokens)
        if flight.launched.follows:
            row.seen = len(row.ids)
        return output

    def close(self, row: Row) -> None:
        """Free the row at once; what it has read stays for others until its place is needed."""
        if not row.open:
            return
        row.open = row.live = False
        row.processor = None
        self.state.rows.done[row.place].fill_(True)
        self.state.rows.lengths[row.place].fill_(row.known)
        self._touch(row)

    def reset(self) -> None:
        """After a step that failed as a whole: no row is open any more, none is kept."""
        self.flights.clear()
        for row in self.at:
            if row is not None:
                row.open = row.live = False
        self.at = [None] * len(self.at)
        self.state.rows.done.fill_(True)
        self.state.rows.lengths.fill_(0)
        self._changed()

    def _live(self, kind: Kind) -> list[Row]:
        rows = [row for row in self.at if row is not None and row.live and row.drafts == kind.drafts]
        return [row for row in rows if kind.watched in (None, row.watched)]

    def recorded_places(self, rows: int) -> int:
        """Places of the recorded step that so many rows take."""
        return next(n for n in self.sizes if n >= rows)

    def _gather(self, rows: list[Row], size: int, start: int | None = None) -> tuple[int, int]:
        """Move these rows, and no other live row, into `size` places from `start` on, or where fewest rows move."""
        start, swaps = arrange(self.at, rows, size, start)
        for a, b in swaps:
            self._swap(a, b)
        return start, start + size

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

    def _reuse(self, row: Row) -> None:
        """Copy what any row has already read of this prompt; its last token is always read, for its logits."""
        best, most = best_source(self.at, row)
        if best is not None:
            self.state.copy(best.place, row.place, row.known, most)
            row.reused += most - row.known
            row.known = most
            self._touch(best)

    def _touch(self, row: Row) -> None:
        self.clock += 1
        row.used = self.clock
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.samplings.clear()

    def _places(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.place for row in rows], device=self.target.device)

    def _sampling(self, start: int, stop: int) -> Sampling:
        """Of the live rows among these; the others choose greedily, and nobody reads their tokens."""
        if (start, stop) not in self.samplings:
            rows = [row if row is not None and row.live else None for row in self.at[start:stop]]
            every = [SamplingParams() if row is None else row.request.sampling for row in rows]
            sampling = Sampling.of(every, self.target.vocab_size, self.target.device)
            self.samplings[start, stop] = replace(sampling, processor=row_processor(rows, self.slack - 1))
        return self.samplings[start, stop]
