"""Steps of the running batch as the planner plans them."""

import time
from collections.abc import Mapping, Sequence

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters.traits import copies, network_of
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.runtime.batch import Batch
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Row


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


def planner_for(drafter: Drafter, shape: Shape) -> tuple[Planner, Drafter]:
    """The planner of a drafter whose drafts have this shape, and what drafts: the host looks up n-grams itself."""
    network = network_of(drafter)
    return Planner(None if network is None else shape, copies=copies(drafter)), network or drafter
