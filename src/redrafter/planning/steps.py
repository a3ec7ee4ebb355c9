"""Steps of the running batch as the planner plans them."""

import time
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters.traits import copies, network_of
from redrafter.planning.costs import Costs, costs_on
from redrafter.planning.late import LatePlanner, beams
from redrafter.planning.late_steps import LateSteps
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.runtime.batch import Batch
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Row

CPU = torch.device("cpu")


class PlannedSteps:
    """Steps that a planner plans and learns from.

    A second is one that this thread computes or waits at a barrier of its team. The wall clock counts other programs,
    too, and the CPU time of all threads how long they spin.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def step(self, batch: Batch, rows: Sequence[Row], pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        """A step of all rows of the batch, planned for those of `rows` that began."""
        known = [row for row in rows if row in self.planner.rows]
        live = batch.live
        others = sum(not row.drafts for row in live)
        room = {row: row.request.max_new_tokens - len(row.ids) + len(row.request.prompt) for row in known}
        slots = sum(row.known for row in live)
        plan = self.planner.choose(room, others, slots) if known else Plan()
        if plan.shape is not None and not all(row.seen for row in known):
            batch.catch_up(known)  # to read a text for the first time is not what a step costs
        began = time.thread_time()
        results = batch.step(plan.shape, pieces=pieces, copied=plan.copied, pack=plan.pack)
        seconds = time.thread_time() - began
        gained = {row: output.tokens for result in results for row, output in result.rows if row in room}
        if plan.expected:
            for result in results:
                for row, output in result.rows:
                    output.expected = plan.expected.get(row, 0.0)
        whole = not pieces and all(result.size == len(result.rows) == len(gained) + others for result in results)
        drafts = sum(result.draft_seconds for result in results)
        self.planner.learn(plan, gained, (drafts, seconds - drafts) if whole else None, others, slots)
        return results

    def open(self, row: Row) -> None:
        """A row begins: its prompt is read and its first token chosen."""
        self.planner.open(
            row,
            [*row.past, *row.ids],
            sampled=row.request.sampling.temperature > 0,
            # A grammar's own tokens are better guesses than copied ones, and it would forbid many of these.
            copies=row.processor is None,
            learns=row.request.constraint is None,  # a grammar drops guesses and forces tokens
        )

    def close(self, row: Row) -> None:
        """A row ends. One that never began is ignored."""
        self.planner.close(row)

    def reset(self) -> None:
        """All rows ended."""
        self.planner.rows.clear()


class FixedSteps:
    """Steps that nobody plans: rows that draft have one shape; None: plain decoding."""

    def __init__(self, shape: Shape | None) -> None:
        self.shape = shape

    def choose(self, rows: int) -> Shape | None:  # noqa: ARG002
        """The shape of a step in which so many rows draft."""
        return self.shape

    def shapes(self, rows: int) -> Sequence[Shape | None]:
        """All shapes that such a step may have."""
        return [self.choose(rows)]

    def step(self, batch: Batch, rows: Sequence[Row], pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        """A step of all rows of the batch, of which these draft."""
        return batch.step(self.choose(len(rows)) if rows else None, pieces=pieces)

    def open(self, row: Row) -> None:
        """Nothing is planned."""

    def close(self, row: Row) -> None:
        """Nothing was kept of it."""

    def reset(self) -> None:
        """Nothing was kept."""


AnyPlanner = Planner | LatePlanner
Steps = PlannedSteps | LateSteps | FixedSteps


def planner_for(
    drafter: Drafter, shape: Shape, device: torch.device = CPU, count: int = 1, seeded: bool = True
) -> tuple[AnyPlanner, Drafter]:
    """The planner of a drafter whose largest drafts have this shape, and what drafts.

    On a CPU the host looks up n-grams itself, under the rule `seeded`. On a GPU, and under rules whose texts depend on
    the tree, there may be `count` beams for each number of rows.
    """
    if device.type != "cpu" or not seeded:
        return late_planner(shape, count, costs_on(device.type)), drafter
    network = network_of(drafter)
    return Planner(None if network is None else shape, copies=copies(drafter)), network or drafter


def late_planner(shape: Shape, count: int = 1, costs: Costs | None = None) -> LatePlanner:
    """The planner of recorded steps, with so many beams for each number of rows; by default at the prices of a GPU."""
    return LatePlanner(cache(lambda rows: beams(shape, rows, count)), costs)


def steps_of(planner: AnyPlanner) -> Steps:
    """Steps that this planner plans."""
    return PlannedSteps(planner) if isinstance(planner, Planner) else LateSteps(planner)
