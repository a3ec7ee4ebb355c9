"""Runs `core.step` over neighbouring places of the running batch: eagerly, or as a recorded CUDA graph.

Both leave the same result layout (steps.py). A recorded step is read later: the host launches the next step first. Only
a step in which the host takes part is read at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter
from redrafter.drafters.copied import Copied
from redrafter.drafters.step_drafter import StepDrafter
from redrafter.kernels import compile_kernels
from redrafter.runtime.graph import recorded, unrecorded
from redrafter.runtime.guide import RowProcessors
from redrafter.runtime.host_step import host_step, runs_on_host
from redrafter.runtime.row import Row, RowOutput, logprobs_of
from redrafter.runtime.state import BatchState, assign, tensors_of, with_tensors
from redrafter.runtime.steps import GuidedStep, Step, WholeStep, run_step
from redrafter.targets import Target

if TYPE_CHECKING:
    from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)

Results = list[list[list[int]]]
"""By step, by row: the result layout of `runtime.steps`."""


@dataclass(frozen=True)
class Launched:
    """A step that was launched; `results` waits for the end of it."""

    results: Callable[[], Results]
    width: int  # of the new tokens and of the path in the result layout
    follows: bool  # the drafter has taken in the new tokens
    logits: Tensor | None = None  # (B, N+1, V), kept where a row wants log-probabilities
    late: bool = False  # the results may be read after the next launch
    recording: float = 0.0  # seconds that the launch took to record the step first

    def output(self, results: Results, line: int, row: Row) -> RowOutput:
        """What the steps gave one row, from its line of the results."""
        output, width = RowOutput([], error=row.error), self.width
        for lines in results:  # thousands of rows in bulk writing: no work here but for what is needed
            values = lines[line]
            count, drafted, done, nodes = values[:4]
            output.tokens += values[4 : 4 + count]
            output.drafted += min(count, drafted)
            output.nodes += nodes
            output.steps += 1
            if done:
                output.done = True
                break
        size = (len(values) - 4 - 2 * width) // 2
        cuts = (4, 4 + width, 4 + 2 * width, 4 + 2 * width + size, 4 + 2 * (width + size))
        tokens, path, tree, parents = (values[a:b] for a, b in pairwise(cuts))  # of the last step
        output.tree = (tree[: nodes + 1], parents[: nodes + 1], path[: min(count, drafted) + 1])
        if row.logprobs is not None and self.logits is not None:
            output.logprobs = logprobs_of(self.logits[line][path[:count]], tokens[:count], row.logprobs)
        return output


class Executor:
    """Makes recorded steps at their first use and keeps them. Without `recorded`, every step runs eagerly.

    compiles: the target's pass (its layers fused or compiled). compiles_step: everything else of a recorded step too,
    which takes half a minute for each kind of step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        state: BatchState,
        rules: Callable[[Shape], Rule],
        *,
        recorded: bool,
        compiles: bool,
        compiles_step: bool,
    ) -> None:
        self.target, self.drafter, self.state, self.make_rule = target, drafter, state, rules
        self.recorded = recorded
        self.verifier: Target | TreeTarget = target
        self.run_step: Callable[..., Any] = run_step
        # Imported where they are needed: they import much of transformers, and packed weights on a CPU need little.
        if recorded:
            from redrafter.targets.cuda.verifier import verifier

            self.verifier = verifier(target, compiles)
        if compiles_step:
            from redrafter.targets.cuda.layer_compile import TOGETHER

            self.run_step = torch.compile(run_step, dynamic=False, options=TOGETHER)
        self.plain = NoDrafter()
        self.rules: dict[Shape | None, Rule] = {}
        self.steps: dict[Any, RecordedStep | None] = {}  # None: cannot be recorded
        self.memory = self._new_memory()

    def rule(self, shape: Shape | None) -> Rule:
        if shape not in self.rules:
            self.rules[shape] = self.make_rule(shape or self.plain.default_shape)
        return self.rules[shape]

    @property
    def unrecorded(self) -> "Target | TreeTarget":
        """What runs passes that are not recorded: the verifier if it keeps a token's bits, else the target itself."""
        exact = not isinstance(self.verifier, Target) and self.verifier.same_bits
        return self.verifier if exact else self.target

    def run(
        self,
        start: int,
        stop: int,
        drafts: bool,
        shape: Shape | None,
        sampling: Sampling,
        extent: int,
        heard: bool,
        copied: Sequence[Copied] | None = None,
    ) -> Launched:
        """One eager step of places start..stop-1, whose rows fill at most `extent` slots, the tree's included.

        What was `copied` for each place is mixed into the draft; without a shape, it is verified alone.
        """
        rows, drafter, cache = self._parts(start, stop, drafts, shape, sampling, trims=True)
        cache.extent = extent
        drafter.copied = copied
        if isinstance(sampling.processor, RowProcessors):
            drafter.edit = sampling.processor.guess
        target = _LogitsKept(self.unrecorded)
        rule = self.rule(shape)
        if runs_on_host(rows, rule):
            lines, width = host_step(rows, cache, sampling, rule, drafter, target)
        else:
            out, width = run_step(rows, cache, sampling, rule, drafter, target)
            lines = out.tolist()
        return Launched(lambda: [lines], width, drafter.guesses, target.logits if heard else None)

    def launch(
        self,
        start: int,
        stop: int,
        drafts: bool,
        shape: Shape | None,
        sampling: Sampling,
        version: int,
        count: int,
        watched: bool = False,
    ) -> Launched | None:
        """`count` recorded steps; None if they cannot be recorded. `version` tells samplings apart.

        `watched`: the host takes part, by the sampling's `RowProcessors` or since it wants the logits.
        """
        assert count == 1 or not watched, "the host takes part in each step: launch one at a time"
        processors = sampling.processor
        sampling = as_kind(replace(sampling, processor=None), self.target.vocab_size)
        key = (start, stop, drafts, shape, sampling.samples, sampling.filters, sampling.penalises, watched)
        began = time.perf_counter()
        if key not in self.steps:
            self.steps[key] = self._record(start, stop, drafts, shape, sampling, watched)
        recording = time.perf_counter() - began
        mine = self.steps[key]
        if mine is None:
            return None
        if mine.version != version:
            assign(mine.sampling, sampling)
            mine.version = version
        step, logits = mine.step, None
        if isinstance(step, GuidedStep):
            step.processors = processors if isinstance(processors, RowProcessors) else None
            logits = step.logits
        follows, results = drafts and shape is not None, mine.launch(count)
        return Launched(results, step.result[1], follows, logits, late=not watched, recording=recording)

    def _record(
        self, start: int, stop: int, drafts: bool, shape: Shape | None, sampling: Sampling, watched: bool
    ) -> "RecordedStep | None":
        sampling = with_tensors(sampling, [x.clone() for x in tensors_of(sampling)])
        rows, drafter, cache = self._parts(start, stop, drafts, shape, sampling, trims=False)
        rule, run, target = self.rule(shape), self.run_step, self.verifier  # not self: a circle would hold memory
        step: Step = WholeStep(lambda: run(rows, cache, sampling, rule, drafter, target))
        if watched:
            step = GuidedStep(rows, cache, sampling, rule, drafter, target)
        log.info("recording a step of %s for %d rows", self.target.name, stop - start)
        try:
            if drafts and _holds_cache(rows.state):
                raise RuntimeError("the drafter has a KV cache of its own")
            with self.target.timed("compile the step's kernels"):
                self._compile_kernels(rows, cache, sampling, rule, drafter)
            with self.target.timed("compile and record the step"):
                return RecordedStep(step, lambda: serving(target, cache), rows, sampling, self.memory)
        except torch.OutOfMemoryError:
            self.memory = self._new_memory()
            raise
        except Exception as error:  # of the model, the compiler, Triton or the recording
            self.memory = self._new_memory()
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("steps of %s cannot be recorded as a graph and run one by one (%s)", self.target.name, first)
            return None

    def _compile_kernels(
        self, rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: StepDrafter
    ) -> None:
        """Compile the kernels of a step at once, by a step that runs none of them; the rows are then as before.

        Only for fused layers: layers that are not fused would write keys of no meaning to the KV cache. Nor may hidden
        states of no meaning get into the history.
        """
        target = self.verifier
        if isinstance(target, Target) or not target.forwards.fused:
            return
        dry = StepDrafter(drafter.drafter, rows, None, guesses=drafter.guesses, trims=False)
        dry.layers = drafter.layers
        before = [x.clone() for x in tensors_of(rows)]
        try:
            with serving(target, cache):
                compile_kernels(lambda: run_step(rows, cache, sampling, rule, dry, target), self.target.device)
        finally:
            for mine, value in zip(tensors_of(rows), before, strict=True):
                mine.copy_(value)

    def _new_memory(self) -> Any:
        """Recorded steps never run at once, so they share working memory; a recording that fails makes it unusable."""
        return torch.cuda.graph_pool_handle() if self.recorded and self.target.device.type == "cuda" else None

    def _parts(
        self, start: int, stop: int, drafts: bool, shape: Shape | None, sampling: Sampling, trims: bool
    ) -> tuple[Rows, StepDrafter, KVCache]:
        rows = self.state.view(start, stop, drafts=drafts, counted=sampling.penalises)
        guesses = drafts and shape is not None
        history = self.state.view_history(start, stop)
        drafter = StepDrafter(self.drafter if drafts else self.plain, rows, history, guesses=guesses, trims=trims)
        if self.recorded:  # one compiled pass serves rows with and without a drafter
            drafter.layers = self.drafter.layers
        return rows, drafter, self.state.cache.part(start, stop)


class RecordedStep:
    """A step over fixed buffers, as one graph for each of its parts. Without a GPU a replay runs the part itself."""

    def __init__(
        self,
        step: Step,
        attention: Callable[[], AbstractContextManager[None]],
        rows: Rows,
        sampling: Sampling,
        memory: Any = None,
    ) -> None:
        self.step, self.sampling = step, sampling
        self.version = -1
        self.hosts: dict[int, list[Tensor]] = {}
        self.turn = 0

        def within(part: Callable[[], None]) -> None:
            with attention():
                part()

        before = [x.clone() for x in tensors_of(rows)]
        try:  # steps before the recording write behind the rows' ends only; the rows are then as before
            if rows.last.is_cuda:
                with attention():
                    self.graphs = recorded(step.parts, memory)
            else:
                self.graphs = unrecorded([partial(within, part) for part in step.parts])
        finally:
            for mine, value in zip(tensors_of(rows), before, strict=True):
                mine.copy_(value)

    def launch(self, count: int) -> Callable[[], Results]:
        """Run `count` steps. Two launches may be under way: each has host memory of its own."""
        out, _ = self.step.result
        if count not in self.hosts:
            shape = (count, *out.shape)
            self.hosts[count] = [torch.empty(shape, dtype=torch.long, pin_memory=out.is_cuda) for _ in range(2)]
        self.turn = 1 - self.turn
        host = self.hosts[count][self.turn]
        for i in range(count):
            for graph, work in zip_longest(self.graphs, self.step.between):
                graph.replay()
                if work is not None:
                    work()
            host[i].copy_(self.step.result[0], non_blocking=True)
        event = torch.cuda.Event() if out.is_cuda else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()

        def results() -> Results:
            if event is not None:
                event.synchronize()
            found: Results = host.tolist()
            return found

        return results


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


def sizes_up_to(rows: int) -> list[int]:
    """Row counts of recorded steps: 1, 2, 4, ... and the number itself.

    >>> sizes_up_to(6)
    [1, 2, 4, 6]
    """
    return [2**i for i in range(rows.bit_length()) if 2**i < rows] + [rows]


def serving(target: "Target | TreeTarget", cache: KVCache) -> AbstractContextManager[None]:
    """While in force, the tree kernel reads this KV cache; a target with its own attention is given its cache."""
    return nullcontext() if isinstance(target, Target) else target.using(cache)


def _holds_cache(state: Any) -> bool:
    """Whether a KV cache is part of a drafter's state, or of a state inside it."""
    return isinstance(state, KVCache) or (is_dataclass(state) and any(map(_holds_cache, vars(state).values())))


class _LogitsKept:
    """The target, with the logits of its last pass at hand."""

    def __init__(self, target: "Target | TreeTarget") -> None:
        self.target = target
        self.logits: Tensor | None = None

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with serving(self.target, cache):  # not around the whole step: a drafter may run the same model
            self.logits, hidden = self.target.verify(tree, lengths, cache, layers)
        return self.logits, hidden
