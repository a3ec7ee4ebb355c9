"""Step costs of the server's batch, by number of rows."""

import pytest

from redrafter import Engine, Shape
from redrafter.drafters import NoDrafter
from redrafter.runtime.recorded import sizes_up_to
from redrafter.targets import Target
from redrafter.tuning import batch_cost
from redrafter.tuning.batch_cost import Interrupted, measure_steps, written_texts
from redrafter.tuning.profile import SimulatedShape
from redrafter.tuning.simulate import simulate_shapes
from redrafter.tuning.step_cost import time_steps
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


def test_writing_and_simulating_make_way_within_a_text(monkeypatch):
    monkeypatch.setattr(batch_cost, "TEXTS", 2)
    monkeypatch.setattr(batch_cost, "TEXT_TOKENS", 40)
    target = Target(make_model())
    engine = Engine(target, NoDrafter())
    calls, served = [], []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted

    usual = written_texts(engine, lambda *_: None)
    texts = written_texts(engine, lambda *_: served.append(len(calls)), check)
    assert served == [0, 3], "in the middle of a text, and it is begun again"
    assert [texts.row(i).tolist() for i in range(len(texts))] == [usual.row(i).tolist() for i in range(len(usual))]
    paused = []
    drafter = recurrent_drafter(target)
    simulate_shapes(target, drafter, texts, [Shape(width=1, length=2)], 0.0, lambda *_: None, lambda: paused.append(1))
    assert len(paused) > 10


def test_rows_are_closed_if_their_opening_is_interrupted():
    target = Target(make_model())
    batch = make_batch(target, recurrent_drafter(target), shapes=[Shape(width=1, length=2)])
    left = iter([None, None])

    def check():
        if next(left, 0) == 0:
            raise Interrupted

    with pytest.raises(Interrupted):
        time_steps(batch, 3, [Shape(width=1, length=2)], [[1, 2]], batch_cost.EAGER_BUDGET, check=check)
    assert batch.free == batch.rows
