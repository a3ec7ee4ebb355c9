"""The same step over fixed buffers, compiled and recorded as one CUDA graph from draft to commit.

torch.compile sees `core.step` as it is; only the target's pass is compiled by itself, for any number of nodes, so
that a new shape does not compile the model anew.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, step
from redrafter.core.step import Target as Verifies
from redrafter.runtime.arena import Arena
from redrafter.runtime.eager import Gain
from redrafter.runtime.graph import recorded
from redrafter.runtime.reader import Reader
from redrafter.targets import Target
from redrafter.targets.cuda.layer_compile import TOGETHER
from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)


class NotRecordable(Exception):
    """Why a step cannot become a graph; the run goes on without one."""


def leaves(state: Any) -> list[Tensor]:
    """All tensors of a batch's state, in a fixed order."""
    if isinstance(state, Tensor):
        return [state]
    if is_dataclass(state):
        return [x for f in fields(state) for x in leaves(getattr(state, f.name))]
    if state is None or isinstance(state, bool | int | float | str):
        return []
    raise NotRecordable(f"a state holds a {type(state).__name__}")


def rebuilt(state: Any, tensors: list[Tensor]) -> Any:
    """The same state with these tensors in place of its own."""
    if isinstance(state, Tensor):
        return tensors.pop(0)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: rebuilt(getattr(state, f.name), tensors) for f in fields(state)})
    return state


def advance(
    rows: Rows, out: Tensor, cache: KVCache, sampling: Sampling, rule: Rule, drafter: Drafter, target: Verifies
) -> None:
    """A step whose result takes the place of what it began from; what the host wants goes to `out`."""
    new, accepted = step(rows, cache, sampling, rule, drafter, target)
    counts = (accepted.count, accepted.drafted, new.done.long(), accepted.nodes)
    told = torch.cat([torch.stack(counts, dim=1), accepted.tokens], dim=1)
    out[:, : told.shape[1]] = told
    for old, value in zip(leaves(rows), leaves(new), strict=True):
        if old is not value:
            old.copy_(value)


class Program:
    """One step over fixed buffers. `begin` fills them, `launch` runs a step, `read` tells what it gave.

    Without a GPU nothing is recorded and a launch is a step: slower than `EagerRun`, but the same in all else.
    """

    def __init__(
        self, target: Target, verifier: Target | TreeTarget, drafter: Drafter, rule: Rule, arena: Arena, compiles: bool
    ) -> None:
        self.target, self.verifier, self.drafter, self.rule, self.arena = target, verifier, drafter, rule, arena
        self.advance: Callable[..., None] = (
            torch.compile(advance, dynamic=False, options=TOGETHER) if compiles else advance
        )
        self.rows: Rows | None = None
        self.sampling: Sampling | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.memory: Any = None  # of the recording: programs that never run at once may share it
        self.columns = 5 + rule.nodes  # of what a step tells
        self.reads_one: Reader | None = None
        self.busy = False

    def begin(self, rows: Rows, sampling: Sampling) -> None:
        """Take over a batch after its prefill."""
        if self.rows is None or self.sampling is None:
            self.rows = rebuilt(rows, [x.clone() for x in leaves(rows)])
            self.sampling = rebuilt(sampling, [x.clone() for x in leaves(sampling)])
            try:
                self._prepare()
            except BaseException:  # not half made: the next to come begins anew
                self.rows = self.sampling = self.graph = None
                raise
        for mine, new in ((self.rows, rows), (self.sampling, sampling)):
            for old, value in zip(leaves(mine), leaves(new), strict=True):
                old.copy_(value)
        self.launched = self.told = 0

    def adopt(self, rows: Rows, sampling: Sampling) -> None:
        """Run over these rows themselves, which others fill; they are as before afterwards."""
        before = [x.clone() for x in leaves(rows)]
        self.rows, self.sampling = rows, rebuilt(sampling, [x.clone() for x in leaves(sampling)])
        try:
            self._prepare()
        finally:
            for buffer, value in zip(leaves(rows), before, strict=True):
                buffer.copy_(value)
        self.launched = self.told = 0

    def _prepare(self) -> None:
        """Where results go, and on a GPU the recording."""
        assert self.rows is not None
        last = self.rows.last
        self.out = torch.zeros(len(last), self.columns, dtype=torch.long, device=last.device)
        self.host = [torch.empty(self.out.shape, dtype=torch.long, pin_memory=last.is_cuda) for _ in range(2)]
        self.ready = [torch.cuda.Event() if last.is_cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        if last.is_cuda:
            self._record()

    def reader(self, rows: int) -> Target | TreeTarget | Reader:
        """Who reads so many prompts into the cache: the model as it is, or compiled; recorded for a single row."""
        if not isinstance(self.verifier, TreeTarget):
            return self.target
        if rows == 1:
            if self.reads_one is None:
                self.reads_one = Reader(self.verifier, self.arena, self.drafter.layers)
            return self.reads_one
        return self.verifier if self.verifier.compiles else self.target

    def attention(self) -> AbstractContextManager[None]:
        """The tree kernel's, unless the model verifies by its own."""
        return self.verifier.using(self.arena) if isinstance(self.verifier, TreeTarget) else nullcontext()

    def _step(self) -> None:
        assert self.rows is not None
        assert self.sampling is not None
        self.advance(self.rows, self.out, self.arena, self.sampling, self.rule, self.drafter, self.verifier)

    def _record(self) -> None:
        """Steps before the recording compile and tune; they write behind the rows' ends only, and rows are refilled."""
        log.info("recording a step of %s for %d rows", self.target.name, len(self.out))
        with self.attention():
            self.graph = recorded(self._step, self.memory)

    def launch(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            with self.attention():
                self._step()
        at = self.launched % 2
        self.host[at].copy_(self.out, non_blocking=True)
        if (event := self.ready[at]) is not None:
            event.record()
        self.launched += 1

    def tell(self) -> list[list[int]]:
        """What the oldest step not yet told wrote to `out`; waits for it."""
        at = self.told % 2
        if (event := self.ready[at]) is not None:
            event.synchronize()
        self.told += 1
        told: list[list[int]] = self.host[at].tolist()
        return told

    def read(self, rows: Sequence[int]) -> Gain:
        """The same, for these rows."""
        told = self.tell()
        return Gain(
            tokens=[told[r][4 : 4 + told[r][0]] for r in rows],
            drafted=[min(told[r][0], told[r][1]) for r in rows],
            done=[bool(told[r][2]) for r in rows],
            nodes=[told[r][3] for r in rows],
        )
