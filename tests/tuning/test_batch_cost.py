"""Step costs of the server's batch, by number of rows."""

from redrafter import Shape
from redrafter.runtime.executor import sizes_up_to
from redrafter.targets import Target
from redrafter.tuning.batch_cost import measure_steps
from redrafter.tuning.profile import SimulatedShape
from tests.helpers.batches import FakeSteps, make_batch
from tests.helpers.zoo import make_model, recurrent_drafter


def test_rows_with_a_full_context_are_opened_again(monkeypatch):
    target = Target(make_model())
    shapes = [Shape(width=3, length=3), Shape(width=1, length=2)]
    batch = make_batch(target, recurrent_drafter(target), context=40, shapes=shapes)
    FakeSteps(monkeypatch)
    opened = []
    real = batch.open
    batch.open = lambda *a, **k: (opened.append(1), real(*a, **k))[1]
    simulated = [SimulatedShape(shapes[0], 0.0, 2.0), SimulatedShape(shapes[1], 0.0, 1.9)]
    step_costs, best_shapes = measure_steps(batch, simulated, [[1, 2, 3], [4, 5]])
    assert {(c.rows, c.shape and c.shape.budget): c.ms for c in step_costs if c.rows == 1} == {
        (1, None): 10.0, (1, 9): 19.0, (1, 2): 12.0,
    }  # fmt: skip
    assert [best.shape for best in best_shapes] == [shapes[1]] * 3
    assert len(opened) > 1 + 2 + 4, "some rows were full"
    assert batch.free == 4


def test_shapes_above_the_best_one_are_not_timed_for_more_rows(monkeypatch):
    """One row: the small shape is best, so two and four rows time only shapes up to its budget."""
    target = Target(make_model())
    shapes = [Shape(width=3, length=3), Shape(width=1, length=2), Shape(width=1, length=1)]
    batch = make_batch(target, recurrent_drafter(target), shapes=shapes)
    FakeSteps(monkeypatch)
    tokens = (1.5, 1.9, 1.05)
    simulated = [SimulatedShape(shape, 0.0, n) for shape, n in zip(shapes, tokens, strict=True)]
    step_costs, best_shapes = measure_steps(batch, simulated, [[1, 2, 3]])
    timed = {rows: [c.shape for c in step_costs if c.rows == rows] for rows in sizes_up_to(4)}
    assert timed == {1: [None, *shapes], 2: [None, *shapes[1:]], 4: [None, *shapes[1:]]}
    assert {best.shape for best in best_shapes} == {shapes[1]}
