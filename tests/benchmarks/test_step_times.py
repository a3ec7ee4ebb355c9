"""Timing steps: the batch really takes them, in turns, within the context and the time given."""

import pytest

from benchmarks.step_times import DummyDrafter, TimingBudget, open_rows, time_steps
from redrafter.config import SamplingParams
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from tests.helpers.batches import CHAIN, TREE, FakeSteps, make_batch
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter


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
            written = [w for result in batch.step(drafted) for _, w in result.rows]
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
