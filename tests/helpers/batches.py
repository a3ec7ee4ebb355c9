"""A running batch of a toy target, and steps whose cost is known."""

import pytest

from benchmarks import step_times
from redrafter import Shape
from redrafter.runtime.batch import Batch
from redrafter.targets import Target

CHAIN, TREE = Shape(width=1, length=3, nodes=3), Shape(width=2, length=4, nodes=7)


def make_batch(target: Target, drafter, **changes) -> Batch:
    return Batch(target, drafter, **({"rows": 4, "context": 90, "kept": 1, "shapes": [TREE]} | changes))


class FakeSteps:
    """Steps that are taken but cost what we say: 10 ms for a plain step, 1 ms more for each node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Shape | None, int]] = []
        self.real = step_times.run_steps
        monkeypatch.setattr(step_times, "run_steps", self)

    def __call__(self, batch: Batch, shape: Shape | None, count: int) -> float:
        self.taken.append((shape, count))
        assert self.real(batch, shape, count) > 0
        return 10.0 + (shape.budget if shape else 0)
