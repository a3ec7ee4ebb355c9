"""Recorded steps over parts of a table: one for each number of rows, shape and kind of sampling."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from redrafter.config import Shape
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Rows
from redrafter.runtime.compiled import verifier
from redrafter.runtime.program import NotRecordable, Program
from redrafter.runtime.table import Table, Watched, store, told_step
from redrafter.targets import Target

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""A recorded step has one of these numbers of rows."""


class Recorder:
    """Makes a program at its first use and keeps it. They never run at once, so they share their working memory."""

    def __init__(self, target: Target, table: Table, compiles: bool) -> None:
        self.target, self.table, self.compiles = target, table, compiles
        self.programs: dict[Any, Program | None] = {}
        self.filled: dict[Any, int] = {}  # which version of the rows a program's sampling is of
        self.memory = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None

    def program(
        self,
        start: int,
        stop: int,
        shape: Shape | None,
        rule: Rule,
        sampling: Sampling,
        version: int,
        watched: Callable[[Rows], Watched],
        drafts: bool,
    ) -> Program | None:
        """For these places; None if it cannot be recorded. `watched` makes the drafter for a program that is new."""
        sampling = as_kind(sampling, self.target.vocab_size)
        key = (start, stop, drafts, shape, sampling.samples, sampling.penalises)
        if key not in self.programs:
            rows = self.table.view(start, stop, drafts=drafts, counted=sampling.penalises)
            drafter = watched(rows)
            part: Any = self.table.cache.part(start, stop)
            made = Program(self.target, verifier(self.target, self.compiles), drafter, rule, part, compiles=False)
            made.advance, made.columns, made.memory = told_step, columns(shape), self.memory
            self.programs[key] = None
            try:
                made.adopt(rows, sampling)
                self.programs[key] = made
            except torch.OutOfMemoryError:
                del self.programs[key]
                raise
            except (NotRecordable, RuntimeError) as error:
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                log.warning("steps of %d rows cannot be recorded and run one by one (%s)", stop - start, first)
        program = self.programs[key]
        if program is not None and self.filled.get(key) != version:
            assert program.sampling is not None
            store(program.sampling, sampling)
            self.filled[key] = version
        return program


def as_kind(sampling: Sampling, vocab_size: int) -> Sampling:
    """One of three kinds, so that few programs serve all rows: greedy, sampled, or with all there is."""
    if sampling.sorts or sampling.floors or sampling.penalises or sampling.bias is not None:
        bias = sampling.bias
        if bias is None:
            bias = sampling.temperature.new_zeros(len(sampling.temperature), vocab_size)
        return replace(sampling, sorts=True, floors=True, penalises=True, samples=True, bias=bias)
    return sampling


def columns(shape: Shape | None) -> int:
    """Of what `told_step` tells."""
    nodes, length = (shape.budget, shape.length) if shape else (0, 0)
    return 4 + 2 * (length + 1) + 2 * (nodes + 1)
