"""Measures what a decoding step costs: plain steps and steps of several shapes take turns in one running batch.

Other programs on the machine slow down all steps of a turn alike. Each shape's time is therefore taken relative to the
plain steps of the same turn, and the median over all turns counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from redrafter.bounds import Bounds, Count, check
from redrafter.config import SamplingParams, Shape
from redrafter.core.rules import Search
from redrafter.core.step import Drafter
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter
from redrafter.drafters.traits import longest_chain
from redrafter.errors import ConfigError
from redrafter.runtime.batch import Batch
from redrafter.runtime.row import Request, Row

READ_TOKENS = 512
"""Prompt tokens read in one piece."""


class DummyDrafter(NoDrafter):
    """Drafts N arbitrary tokens at no cost. A step with this drafter costs what verifying N nodes costs."""

    def __init__(self, replaces: Drafter) -> None:
        self.layers = replaces.layers  # the target must return the same hidden states as for the real drafter

    @staticmethod
    def shape(nodes: int) -> Shape:
        """The shape that drafts this many nodes."""
        return Shape(width=nodes, length=1, nodes=nodes)

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:  # noqa: ARG002
        nodes = search.shape.width
        tokens = torch.arange(nodes + 1, device=last.device).expand(len(last), -1).clone()
        tokens[:, 0] = last
        depths = torch.ones_like(tokens)
        depths[:, 0] = 0
        mask = torch.eye(nodes + 1, dtype=torch.bool, device=last.device)
        mask[:, 0] = True
        return Tree(
            tokens=tokens,
            parents=torch.zeros_like(tokens),
            depths=depths,
            valid=depths >= 0,
            mask=mask.expand(len(last), -1, -1),
            length=1,
        )


@dataclass(frozen=True)
class TimingBudget:
    """How long to measure."""

    turns: Count
    """In each turn, plain decoding and every shape are timed once."""
    steps: Count
    """Timed steps of each shape in a turn."""
    seconds: Annotated[float, Bounds(least=0, most=math.inf)] = math.inf
    """No further turn starts after this much timed work: a busy machine is measured less often, not for longer."""

    def __post_init__(self) -> None:
        check(self)


def time_steps(
    batch: Batch,
    rows: int,
    shapes: Sequence[Shape],
    prompts: Sequence[Sequence[int]],
    budget: TimingBudget,
    sampling: SamplingParams | None = None,
    progress: Callable[[], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, list[float]]:
    """ms of a plain step, and of a step of each shape, with `rows` open rows. `progress` is called after each turn.

    `check` is called before each timing; what it raises ends the measurement, and the rows are closed. Rows whose
    context is full are opened again with their prompts.
    """
    candidates: list[Shape | None] = [None, *shapes]
    per_round = tokens_per_round(shapes, longest_chain(batch.drafter))
    steps = max(1, min(budget.steps, batch.context // (2 * per_round) - 1))
    room = batch.context - (steps + 1) * per_round - 1  # tokens a row may hold before a turn begins
    if room < 1:
        raise ConfigError(
            f"a context of {batch.context} tokens is too short to time {len(shapes)} shapes: use a longer context"
        )
    opened = open_rows(batch, rows, prompts, room, sampling, check=check)
    turns: list[list[float]] = []
    try:
        for shape in candidates:  # compile or record every step before it is timed
            check()
            run_steps(batch, shape, 1)
        while len(turns) < budget.turns:
            if max(row.known for row in opened) > room:
                close_rows(batch, opened)
                opened = open_rows(batch, rows, prompts, room, sampling, check=check)
            turns.append([_time_shape(batch, shape, steps, check) for shape in candidates])
            if progress is not None:
                progress()
            if steps * sum(map(sum, turns)) / 1000 > budget.seconds:
                break
    finally:
        close_rows(batch, opened)
    plain = statistics.median(turn[0] for turn in turns)
    ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(1, len(candidates))]
    return plain, [plain * ratio for ratio in ratios]


def tokens_per_round(shapes: Sequence[Shape], deepest: int = 0) -> int:
    """The most tokens that a row gains from one plain step and one step of each shape.

    A drafter may add a chain that is at most `deepest` tokens deep.
    """
    return 1 + sum(max(shape.length, min(deepest, shape.budget)) + 1 for shape in shapes)


def context_for(shapes: Sequence[Shape], steps: int, prompt_tokens: int) -> int:
    """A context in which `time_steps` can take this many steps of each shape after the whole prompt."""
    return prompt_tokens + 2 * (steps + 1) * tokens_per_round(shapes) + 1


def _time_shape(batch: Batch, shape: Shape | None, steps: int, check: Callable[[], None]) -> float:
    """ms per step. The first step is not timed: there the drafter catches up with tokens of plain steps."""
    check()
    run_steps(batch, shape, 1)
    return run_steps(batch, shape, steps)


def open_rows(
    batch: Batch,
    rows: int,
    prompts: Sequence[Sequence[int]],
    room: int,
    sampling: SamplingParams | None = None,
    first: Shape | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Open rows that have taken their first step, of the shape `first`. Prompts are cut to `room` tokens and used again
    if there are too few.

    `check` is called before each prompt is read; what it raises closes the rows.
    """
    opened: list[Row] = []
    try:
        for i in range(rows):
            check()
            prompt = list(prompts[i % len(prompts)])[: max(1, room)]
            chosen = sampling or SamplingParams()
            request = Request(prompt=prompt, seed=i, max_new_tokens=batch.context, sampling=chosen)
            opened.append(batch.open(request))
            while opened[-1].unread:
                batch.read(opened[-1], READ_TOKENS)
        batch.step(first)
    except BaseException:
        close_rows(batch, opened)
        raise
    return opened


def close_rows(batch: Batch, rows: Sequence[Row]) -> None:
    for row in rows:
        batch.close(row)


def run_steps(batch: Batch, shape: Shape | None, count: int) -> float:
    """Run `count` steps and return ms per step. A GPU finishes all work before the clock starts and before it stops."""
    _synchronize(batch.target.device)
    began = time.perf_counter()
    for _ in range(count):
        batch.step(shape)
    batch.drain()
    _synchronize(batch.target.device)
    return 1000 * (time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
