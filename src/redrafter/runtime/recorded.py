"""Recorded steps of the running batch: CUDA graphs that are launched one behind the other, and read one step late.

A draft and the end of a step are recorded for each kind of step, passes for each number of tokens (flat_pass.py). What
is recorded works on fixed buffers. Without a GPU the same code runs part by part.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from redrafter.config import Shape
from redrafter.core.flat import Piece
from redrafter.core.rows import map_tensors
from redrafter.core.rules import Rule
from redrafter.core.rules.seeded import SeededRule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.core.transfer import put
from redrafter.drafters import NoDrafter
from redrafter.drafters.traits import keeps_cache
from redrafter.kernels import compile_kernels
from redrafter.kernels.tree_attention.naive import DEEPEST
from redrafter.runtime.flat_pass import AT_ONCE, MOST, FlatPasses, FlatStepPass, PaddedStepPass, padded_size
from redrafter.runtime.graph import Moments, new_memory
from redrafter.runtime.guide import RowProcessors
from redrafter.runtime.launched import Launched, Results
from redrafter.runtime.recorded_step import GuidedStep, Parts, RecordedStep, StepKind, StepPass, drafted
from redrafter.runtime.state import BatchState, holds_cache, tensors_of
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets.passes import Pass
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

VISITED = 63
"""Drafted nodes of a row, at most, among which a common budget chooses."""
VERIFIED, VERIFIED_OF_ROW = 256, 8
"""Tokens of a pass that a planned step has at most, and for each row where that is more: nodes beyond seldom pay."""


class RecordedSteps:
    """Makes recorded steps at their first use and keeps them."""

    def __init__(
        self,
        verifier: Pass,
        drafter: Drafter,
        state: BatchState,
        rules: Callable[[Shape], Rule],
        most: int,
        *,
        compiles_step: bool,
    ) -> None:
        """`most`: tokens of trees in a pass. compiles_step: compile what comes before and after the pass."""
        self.verifier, self.drafter, self.state, self.rules = verifier, drafter, state, rules
        self.target = verifier.target
        self.steps: dict[StepKind, RecordedStep | None] = {}  # None: cannot be recorded
        self.warned: set[str] = set()
        self.compiles_step = compiles_step
        self.memory = new_memory(self.target.device)
        self.passes: FlatPasses | None = None
        if verifier.flat is not None:
            self.passes = FlatPasses(verifier.flat, state, drafter.layers, most)

    def launch(
        self,
        kind: StepKind,
        sampling: Sampling,
        version: int,
        count: int,
        pieces: Sequence[Piece] = (),
        guesses: Sequence[bool] = (),
        between: Callable[[], None] = lambda: None,
        budget: int | None = None,
    ) -> Launched | None:
        """`count` steps, the first with pieces of prompts; None if they cannot be recorded.

        `version` tells samplings apart. guesses: which rows may guess, for guides. between: launches what has to come
        between the first pass and the end of its step. budget: of the drafted nodes of all rows, in planned steps; at
        most the largest of `budgets`, for which there is room.
        """
        assert count == 1 or not kind.guided, "the host takes part in each step: launch one at a time"
        processors = sampling.processor if isinstance(sampling.processor, RowProcessors) else None
        sampling = as_kind(replace(sampling, processor=None), self.target.vocab_size)
        budget = min(budget, max(self.budgets(kind))) if kind.planned and budget is not None else None
        began = time.perf_counter()
        if kind not in self.steps:
            self.steps[kind] = self._record(kind, sampling, budget)
        step = self.steps[kind]
        if step is None:
            return None
        step.prepare(budget, pieces)
        recording = time.perf_counter() - began
        step.limit(budget)
        step.use(sampling, version)
        host = step.host(count)
        moments = Moments(self.target.device)
        for i in range(count):
            step.before(processors, guesses)
            if i == 0:
                moments.mark()
            step.parts.passes.run(step.used(budget), pieces if i == 0 else ())
            step.after(between if i == 0 else lambda: None)
            host[i].copy_(step.lines, non_blocking=True)
        moments.mark()

        def results() -> Results:
            moments.seconds()
            lines: Results = host.tolist()
            return lines

        return Launched(
            results,
            step.width,
            kind.follows,
            step.logits,
            late=not kind.guided,
            recording=recording,
            tokens=step.tokens(budget, pieces),
            budget=None if step.parts.pooled is None else budget,
            promised=step.promised,
            parts=list if kind.guided else moments.seconds,  # guides take time of the host between the marks
        )

    @torch.no_grad()
    def record_passes(self, chunk: int) -> None:
        """Record the passes of all recorded steps that also read up to `chunk` prompt tokens.

        A batch without a row that decodes reads more of them: there the first step of some rows follows.
        """
        if self.passes is None:
            return
        self.passes.clear()
        for kind, step in self.steps.items():
            if step is not None and isinstance(step.parts.passes, FlatStepPass):
                area = step.parts.passes.area
                shares = kind.planned and step.parts.pooled is not None
                lines = [kind.rows + nodes for nodes in self.budgets(kind)] if shares else [area]
                most = MOST if kind.shape is None and kind.rows <= AT_ONCE else min(chunk, MOST)
                for size in self.passes.sizes(lines, most):
                    self.passes.graph(area, size, kind.rows, reads=True)

    def kind(
        self,
        rows: int,
        shape: Shape | None,
        follows: bool,
        sampling: Sampling,
        guided: bool = False,
        planned: bool = False,
    ) -> StepKind:
        sampling = as_kind(replace(sampling, processor=None), 1)
        kinds = (sampling.samples, sampling.filters, sampling.penalises)
        return StepKind(rows, shape, follows, *kinds, guided, planned and shape is not None and not guided)

    def budgets(self, kind: StepKind) -> list[int]:
        """What the host may choose in planned steps: nodes of all rows that leave no padding in a pass, and few more.

        One number, where each row has the nodes of the shape.
        """
        assert kind.shape is not None
        rule, step = self.rules(kind.shape), self.steps.get(kind)
        if not self._pools(kind, rule) or (kind in self.steps and (step is None or step.parts.pooled is None)):
            return [kind.rows * rule.nodes]
        return without_padding(kind.rows, visited(kind.shape))

    def ready(self, kind: StepKind, budget: int) -> bool:
        """Whether a step of this kind can be launched without recording anything."""
        step = self.steps.get(kind)
        return kind in self.steps if step is None else step.ready(budget)

    def tokens(self, used: int) -> int:
        """Of the pass over so many, with padding."""
        return used if self.passes is None else padded_size(used)

    def _pools(self, kind: StepKind, rule: Rule) -> bool:
        """Whether rows share a budget: under the rule `seeded` a text does not depend on which nodes are verified."""
        if kind.shape is None or kind.guided or type(rule) is not SeededRule:
            return False
        return self.passes is not None if kind.planned else kind.rows > 1

    def _record(self, kind: StepKind, sampling: Sampling, budget: int | None = None) -> RecordedStep | None:
        log.info("recording a step of %s for %d rows", self.target.name, kind.rows)
        try:
            if kind.follows and (holds_cache(self.state.rows.state) or keeps_cache(self.drafter)):
                raise RuntimeError("the drafter has a KV cache or layers of its own")
            parts = self._parts(kind, map_tensors(sampling, lambda x: x.clone()))
            if parts.pooled is not None and drafted(parts)[0].scores is None:  # nothing to compare nodes by
                parts = self._parts(kind, parts.sampling, pools=False)
            with self.target.timed("compile and record the step"):
                step = (GuidedStep if kind.guided else RecordedStep)(parts, self._compiled)
                return self._recorded(step, budget)
        except torch.OutOfMemoryError:
            self.memory = new_memory(self.target.device)
            raise
        except Exception as error:  # of the model, the compiler, Triton or the recording
            self.memory = new_memory(self.target.device)
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            if first not in self.warned:  # most often all kinds of steps fail alike
                log.warning(
                    "steps of %s cannot be recorded as a graph and run one by one (%s)", self.target.name, first
                )
            self.warned.add(first)
            return None

    def _recorded(self, step: RecordedStep, budget: int | None) -> RecordedStep:
        """Steps before the recording write behind the rows' ends only; the rows are then as before."""
        rows = step.parts.rows
        before = [x.clone() for x in tensors_of(rows)]
        step.limit(budget)
        try:
            if self.passes is not None:  # a padded pass would write keys of no meaning to the KV cache
                compile_kernels(lambda: [action() for action in step.actions], rows.last.device)
                _restore(rows, before)
            step.record(self.memory)
        finally:
            _restore(rows, before)
        return step

    def _parts(self, kind: StepKind, sampling: Sampling, pools: bool = True) -> Parts:
        state, rule, device = self.state, self.rules(kind.shape or NoDrafter.default_shape), self.target.device
        pooled, nodes = None, 0 if kind.shape is None else kind.rows * rule.nodes
        area = kind.rows + nodes
        budgets = put(self.budgets(kind), device) if kind.planned else None
        if kind.shape is not None and isinstance(rule, SeededRule) and pools and self._pools(kind, rule):
            pooled = put(nodes, device)
            if budgets is not None:  # with the padding of its largest pass: all beams share recorded passes
                area = padded_size(kind.rows + max(self.budgets(kind)))
            rule = replace(rule, shape=replace(kind.shape, nodes=visited(kind.shape)))
        elif budgets is not None:
            budgets = budgets[-1:]
        rows = state.view(kind.rows, drafts=kind.follows, counted=kind.penalises)
        drafter = StepDrafter(
            self.drafter,
            rows,
            state.history[: kind.rows],
            follows=state.guesses[: kind.rows] if kind.follows else None,
            guesses=kind.shape is not None,
            deepest=DEEPEST,
        )
        passes: StepPass
        if self.passes is None:
            passes = PaddedStepPass(self.verifier, state, rows, self.drafter.layers)
        else:
            passes = FlatStepPass(self.passes, kind.rows, area)
        return Parts(rows, state.cache.part(0, kind.rows), sampling, rule, drafter, passes, pooled, budgets)

    def _compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if not self.compiles_step:
            return run
        from redrafter.targets.cuda.layer_compile import TOGETHER  # imports much of transformers

        return torch.compile(run, dynamic=False, options=TOGETHER)


def _restore(rows: Any, before: list[torch.Tensor]) -> None:
    for mine, value in zip(tensors_of(rows), before, strict=True):
        mine.copy_(value)


def as_kind(sampling: Sampling, vocab_size: int) -> Sampling:
    """One of four kinds, so that few recorded steps serve all rows: greedy, sampled, filtered, or with penalties."""
    if sampling.penalises or sampling.bias is not None:
        bias = sampling.bias
        if bias is None:
            bias = sampling.temperature.new_zeros(len(sampling.temperature), vocab_size)
        return replace(sampling, sorts=True, floors=True, penalises=True, samples=True, bias=bias)
    if sampling.filters:
        return replace(sampling, sorts=True, floors=True, samples=True)
    return sampling


def records(target: Target, runtime: str, asked: bool | None) -> bool:
    """Whether steps are recorded; `asked` decides where it is not None."""
    wanted = runtime != "eager" and target.device.type == "cuda" if asked is None else asked
    if wanted and target.recurrent:
        log.info("steps of %s are not recorded: it has layers with a recurrent state", target.name)
    return wanted and not target.recurrent


def visited(shape: Shape) -> int:
    """Drafted nodes of a row among which a common budget chooses."""
    return min(shape.width * shape.length, VISITED)


@cache
def without_padding(rows: int, nodes: int) -> list[int]:
    """Budgets of rows with so many drafted nodes each, that leave no padding in a pass; the last may leave some.

    >>> without_padding(1, 63), without_padding(32, 16)
    ([1, 3, 7, 15, 31, 63], [32, 96, 224])
    """
    most, limit = rows * nodes, max(VERIFIED, VERIFIED_OF_ROW * rows)
    sizes = {padded_size(n) for n in range(rows + 1, min(limit, rows + most) + 1)}
    return sorted({min(size - rows, most) for size in sizes if size <= limit})


def sizes_up_to(rows: int) -> list[int]:
    """Row counts of recorded steps: 1, 2, 4, ... and the number itself.

    >>> sizes_up_to(6)
    [1, 2, 4, 6]
    """
    return [2**i for i in range(rows.bit_length()) if 2**i < rows] + [rows]
