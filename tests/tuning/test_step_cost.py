"""Timing steps: the batch really takes them, in turns, within the context and the time given."""

import pytest

from redrafter import Shape
from redrafter.config import SamplingParams
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.runtime.batch import Batch
from redrafter.targets import Target, load_target
from redrafter.tuning import step_cost
from redrafter.tuning.batch_cost import measure_steps
from redrafter.tuning.profile import SimulatedShape
from redrafter.tuning.step_cost import DummyDrafter, TimingBudget, open_rows, time_steps
from tests.helpers.profiles import CHAIN, TREE
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter


def make_batch(target: Target, drafter, **changes) -> Batch:
    return Batch(target, drafter, **({"rows": 4, "context": 90, "kept": 1, "shapes": [TREE]} | changes))


class FakeSteps:
    """Steps that are taken but cost what we say: 10 ms for a plain step, 1 ms more for each node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Shape | None, int]] = []
        self.real = step_cost.run_steps
        monkeypatch.setattr(step_cost, "run_steps", self)

    def __call__(self, batch: Batch, shape: Shape | None, count: int, drafts: bool = True) -> float:
        self.taken.append((shape, count))
        assert self.real(batch, shape, count, drafts) > 0
        return 10.0 + (shape.budget if shape else 0)


def test_the_dummy_drafter_drafts_its_nodes_and_changes_no_text():
    target = load_target(make_model())
    real = recurrent_drafter(target)
    dummy = DummyDrafter(real)
    assert dummy.layers == real.layers
    shape = dummy.shape(5)
    texts = {}
    for drafter, drafted in ((NoDrafter(), None), (dummy, shape)):
        batch = make_batch(target, drafter, shapes=[shape])
        rows = open_rows(batch, 3, PROMPTS, room=50)
        for _ in range(8):
            written = [w for result in batch.step(True, drafted) for _, w in result.rows]
            assert {w.nodes for w in written} == {5 if drafted else 0}
        texts[drafted] = [row.ids[: len(row.request.prompt) + 8] for row in rows]
    assert texts[None] == texts[shape]


def test_steps_are_timed_in_turns(monkeypatch):
    target = load_target(make_model())
    steps = FakeSteps(monkeypatch)
    batch = make_batch(target, recurrent_drafter(target))
    turns = []
    plain, times = time_steps(
        batch, 2, [CHAIN, TREE], PROMPTS, TimingBudget(turns=3, steps=2), None, lambda: turns.append(1)
    )
    assert (plain, times) == (10.0, [13.0, 17.0])
    assert len(turns) == 3
    warm_up = [(None, 1), (CHAIN, 1), (TREE, 1)]
    turn = [(None, 1), (None, 2), (CHAIN, 1), (CHAIN, 2), (TREE, 1), (TREE, 2)]
    assert steps.taken == warm_up + 3 * turn, "every step runs once before any is timed"
    assert batch.free == 4, "all rows are closed"


def test_no_further_turn_once_the_time_is_up(monkeypatch):
    target = load_target(make_model())
    FakeSteps(monkeypatch)
    turns = []
    budget = TimingBudget(turns=9, steps=2, seconds=0.070)  # a turn is 2 × (10 + 13) ms
    time_steps(
        make_batch(target, recurrent_drafter(target)), 1, [CHAIN], PROMPTS, budget, None, lambda: turns.append(1)
    )
    assert len(turns) == 2


def test_sampling_reaches_the_rows(monkeypatch):
    target = load_target(make_model())
    batch = make_batch(target, recurrent_drafter(target))
    [row] = open_rows(batch, 1, PROMPTS, 50, SamplingParams(temperature=0.7))
    assert row.request.sampling.temperature == 0.7


def test_a_context_that_is_too_short_is_refused():
    target = load_target(make_model())
    batch = make_batch(target, recurrent_drafter(target), context=20)
    with pytest.raises(ConfigError, match="a context of 20 tokens is too short to time 2 shapes"):
        time_steps(batch, 1, [CHAIN, TREE], PROMPTS, TimingBudget(turns=1, steps=1))
    assert batch.free == 4


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
