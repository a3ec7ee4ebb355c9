"""A running batch of a toy target, and steps whose cost is known."""

import pytest

from redrafter import Shape
from redrafter.runtime.batch import Batch
from redrafter.targets import Target
from redrafter.tuning import step_cost
from tests.helpers.profiles import TREE


def make_batch(target: Target, drafter, **changes) -> Batch:
    return Batch(target, drafter, **({"rows": 4, "context": 90, "kept": 1, "shapes": [TREE]} | changes))


class FakeSteps:
    """Steps that are taken but cost what we say: 10 ms for a plain step, 1 ms more for each node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Shape | None, int]] = []
        self.real = step_cost.run_steps
        monkeypatch.setattr(step_cost, "run_steps", self)

    def __call__(self, batch: Batch, shape: Shape | None, count: int) -> float:
        self.taken.append((shape, count))
        assert self.real(batch, shape, count) > 0
        return 10.0 + (shape.budget if shape else 0)
