"""Runs recorded steps: the host launches one step before it reads the last, so the GPU never waits for it.

A `Program` is recorded once for its number of rows, length of cache and kind of sampling, and serves one run after
another; what does not fit any becomes another program. What cannot be recorded runs eagerly, with one line in the log.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from redrafter.core.rows import keep_rows
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.errors import OutOfMemory, UnsupportedTarget
from redrafter.runtime.arena import Arena
from redrafter.runtime.eager import EagerRun, Gain, Start
from redrafter.runtime.program import NotRecordable, Program
from redrafter.targets import Target
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.selfcheck import check_tree_kernel

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 10, 16, 20, 32, 40, 64, 80, 128, 256)
"""Batches are filled up to one of these with rows that are done."""
SLOTS = 1024
"""Cache lengths are multiples of this: the tree kernel reads only what is in use, so room costs memory alone."""
NOTHING = Start(prompt=(0,), seed=0, budget=1, eos=())
"""A row that fills up a batch: done after its prompt."""


class CompiledRun:
    """A batch from prompt to end; what `EagerRun` offers, told one step late."""

    def __init__(self, programs: "Programs", sampling: Sampling, starts: Sequence[Start]) -> None:
        size = next((n for n in ROWS if n >= len(starts)), len(starts))
        every = [*starts, *[NOTHING] * (size - len(starts))]
        index = torch.arange(size, device=programs.target.device) % len(starts)
        self.sampling = keep_rows(sampling, index)
        self.places = list(range(len(starts)))
        self.programs = programs
        self.recorded = True  # its own: another batch's failure says nothing of this one
        self.program = programs.take(self.sampling, every)
        self.eager = EagerRun(
            programs.target, programs.drafter, programs.rule, self.sampling, every, cache=self.program.arena
        )

    @torch.no_grad()
    def prefill(self) -> Gain:
        gain = None
        try:
            gain = self._read()
            self.program.begin(self.eager.rows, self.sampling)
            self.program.launch()
        except torch.OutOfMemoryError as error:
            raise no_room("a step's working memory") from error
        except (NotRecordable, RuntimeError) as error:  # a batch that is read goes on as it began
            self.recorded = False
            self.programs.give_up(error)
        return self._mine(gain or self.eager.prefill())

    def _read(self) -> Gain:
        reader = self.program.reader(len(self.eager.longest))
        with self.program.attention() if isinstance(reader, TreeTarget) else nullcontext():
            return self.eager.prefill(reader)

    @torch.no_grad()
    def step(self) -> Gain:
        if not self.recorded:
            return self._mine(self.eager.step())
        self.program.launch()
        return self.program.read(self.places)

    def stop(self, row: int) -> None:
        """End a row from outside; the step under way may still write to it, and nobody reads that."""
        rows = self.program.rows if self.recorded else self.eager.rows
        assert rows is not None
        rows.done[self.places[row]] = True

    def keep(self, rows: list[int]) -> None:
        """Finished rows stay where they are: a graph's rows are fixed, and rows that are done write nothing."""
        self.places = [self.places[r] for r in rows]

    def close(self) -> None:
        self.program.busy = False

    def _mine(self, gain: Gain) -> Gain:
        return Gain(*([x[r] for r in self.places] for x in vars(gain).values()))


class Programs:
    """The recorded steps of one target, drafter and rule.

    compiles: the target's pass, once for all who decode with it; and unless `whole` says otherwise, the rest of a step.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule, compiles: bool = True, whole: bool | None = None
    ) -> None:
        self.target, self.drafter, self.rule = target, drafter, rule
        self.compiles, self.whole = compiles, compiles if whole is None else whole
        self.every: dict[Any, list[Program]] = {}
        self.hopeless = False

    def run(self, sampling: Sampling, starts: Sequence[Start]) -> CompiledRun | EagerRun:
        """Recorded if it can be: a user's own processor is the host's work."""
        if self.hopeless or sampling.processor is not None:
            return EagerRun(self.target, self.drafter, self.rule, sampling, starts)
        return CompiledRun(self, sampling, starts)

    def give_up(self, reason: Exception) -> None:
        self.hopeless = True
        first = f"{type(reason).__name__}: {reason}".splitlines()[0]
        log.warning("steps of %s cannot be recorded as a graph and run one by one (%s)", self.target.name, first)

    def take(self, sampling: Sampling, starts: Sequence[Start]) -> Program:
        """A program that fits and is free."""
        need = max(len(s.prompt) + s.budget for s in starts) + self.rule.nodes + 1
        slots = -(-need // SLOTS) * SLOTS
        eos = max([1, *(len(s.eos) for s in starts)])
        kind = (sampling.sorts, sampling.floors, sampling.penalises, sampling.samples, sampling.bias is not None)
        fitting = self.every.setdefault((len(starts), slots, eos, kind), [])
        program = next((p for p in fitting if not p.busy), None)
        if program is None:
            verifies = verifier(self.target, self.compiles)
            room = self._room(len(starts), slots)
            program = Program(self.target, verifies, self.drafter, self.rule, room, self.whole)
            fitting.append(program)
        program.busy = True
        return program

    def _room(self, rows: int, slots: int) -> Arena:
        """A cache; where there is no room for it, idle programs make some."""
        try:
            return Arena(self.target, rows, slots)
        except torch.OutOfMemoryError:
            pass
        for key, programs in self.every.items():
            self.every[key] = [p for p in programs if p.busy]
        torch.cuda.empty_cache()
        try:
            return Arena(self.target, rows, slots)
        except torch.OutOfMemoryError as error:
            raise no_room(f"a cache for {rows} rows of {slots} tokens") from error


def no_room(what: str) -> OutOfMemory:
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    return OutOfMemory(
        f"{what} does not fit: {free:.1f} of {total:.0f} GiB are free; use fewer rows at once or fewer new tokens"
    )


def verifier(target: Target, compiles: bool) -> Target | TreeTarget:
    """The target through the tree kernel, compiled; or as it is, where the kernel does not do its attention."""
    known: dict[bool, Target | TreeTarget] = target.verifiers
    if compiles not in known:
        try:
            check_tree_kernel(target)
            known[compiles] = TreeTarget(target, compiles)
        except UnsupportedTarget as reason:
            log.info("%s is verified by its own attention (%s)", target.name, reason)
            known[compiles] = target
    return known[compiles]
