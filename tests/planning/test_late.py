"""What the planner of recorded steps decides: drafts that fail cost little time, drafts that pay are never given up."""

import random

import pytest

from benchmarks.planned import at_once, budgets
from redrafter.planning import late as module
from redrafter.planning.late import CLEAR, Action, LatePlanner, Load, beams
from redrafter.runtime.flat_pass import padded_size
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import RowOutput
from tests.helpers.late import DRAFT, PLAIN, TREE, LateWorld, gpu_pass, planner


def useless(_: int, nodes: float) -> float:
    return 0


@pytest.mark.parametrize("said", [0.01, 1.0, 3.4])
def test_a_drafter_that_is_always_wrong_costs_little(said: float) -> None:
    """Whatever it promises: little, as random weights do, or much."""
    plans, first = planner(), LateWorld(useless, promises=lambda n: said * n / 63)
    assert first.run(plans, 400).slowdown < 1.06
    assert first.launched[1].shape == TREE, "it is tried"
    assert first.plain() > 300
    assert first.run(plans, 1000).slowdown < 1.02, "the prices are known by now"


def test_twin_without_the_price_of_a_step_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatePlanner, "seconds", lambda *_: PLAIN)
    assert LateWorld(useless).run(planner(), 1000).slowdown > 1.1


@pytest.mark.parametrize("cost", [1.1, 1.5, 3.0, 12.0])
def test_drafts_that_fail_are_tried_seldom_where_they_cost_much(cost: float) -> None:
    plans, world = planner(), LateWorld(useless, draft=cost * PLAIN - gpu_pass(64))
    world.run(plans, 500)
    assert world.run(plans, 4000).slowdown < 1.02
    assert 2 < world.launched[-4000:].count(world.actions[0]) < 250 / cost


def test_no_draft_is_recorded_to_be_tried_where_drafts_fail() -> None:
    """A recording takes seconds. Twin: what is recorded is tried."""
    plans, plain = planner(), Action(None, 0, 1)
    LateWorld(useless, draft=12 * PLAIN, recorded=True).run(plans, 600)
    for recorded in (False, True):
        world = LateWorld(useless, draft=12 * PLAIN, recorded=recorded)
        world.recorded.add(plain)
        world.run(plans, 4000)
        assert (world.plain() < len(world.launched)) == recorded


def test_the_price_of_a_pass_is_without_the_catching_up_of_eager_steps() -> None:
    """Their wall clock counts it as part of the pass. Twin: recorded steps know what a pass takes."""
    for tokens, learns in ((0, False), (64, True)):
        plans, world = planner(), LateWorld(useless, recorded=True)
        world.run(plans, 100)
        before = plans.costs.saved()
        output = RowOutput([7], steps=1, promised=[1.0])  # type: ignore[list-item]
        given = [(row, output) for row in world.requests]
        result = StepResult(TREE, given, 1, 1.0, tokens=tokens, parts=(2 * DRAFT, 1.0))
        plans.steps = 0
        plans.learn(world.load, world.actions[0], result, [63], resumed=True)
        assert (plans.costs.saved()["passes"] != before["passes"]) == learns
        assert plans.costs.saved()["drafts"] != before["drafts"]


@pytest.mark.parametrize("cost", [1.15, 1.5])
def test_no_text_is_much_slower_than_plain(cost: float) -> None:
    """Drafts that are good and bad by turns, at random."""
    plans, chance = planner(), random.Random(cost)
    LateWorld(useless, draft=cost * PLAIN - gpu_pass(64)).run(plans, 300)
    for _ in range(12):
        period, most = chance.randint(5, 200), chance.randint(1, 4)
        world = LateWorld(
            lambda i, _, p=period, m=most: chance.randint(0, m - 1) if i // p % 2 else 0,
            draft=cost * PLAIN - gpu_pass(64),
            recorded=True,
        )
        assert world.run(plans, 600).slowdown < 1.035


@pytest.mark.parametrize("most", [3, 4, 5])
def test_a_good_drafter_drafts_in_every_step_and_nothing_more_is_recorded(most: int) -> None:
    plans, chance = planner(), random.Random(most)
    world = LateWorld(lambda *_: max(0, chance.randint(most - 3, most)))
    for _ in range(6):
        world.run(plans, 500)
    assert {action.shape for action in world.recorded} == {TREE}


def test_a_drafter_that_becomes_good_is_used_again() -> None:
    plans, chance = planner(), random.Random(3)
    bad = LateWorld(useless, recorded=True).run(plans, 600)
    assert bad.launched.count(bad.actions[0]) < 80
    bad.gives = lambda *_: chance.randint(1, 5)
    begin = len(bad.launched)
    bad.run(plans, 1000)
    again = bad.launched[begin:]
    first = again.index(bad.actions[0])
    assert first < 100
    assert sum(action.shape is None for action in again[first + 6 :]) == 0


def test_a_new_text_tries_the_drafter_at_once() -> None:
    plans = planner()
    LateWorld(useless).run(plans, 600)
    plans.trials = 0.0
    world = LateWorld(lambda *_: 3, recorded=True).run(plans, 100)
    assert world.plain() < 6


@pytest.mark.parametrize(("rows", "least", "most"), [(1, 63, 63), (8, 7, 15), (32, 2, 4)])
def test_so_many_nodes_of_a_row_are_verified(rows: int, least: int, most: int) -> None:
    """With the prices and promises that a planner begins with, and after steps at these prices."""
    budgets = [size - rows for size in (2, 4, 8, 16, 32, 64, 128, 256) if size > rows and size - rows <= 63 * rows]
    plans, chance = planner(), random.Random(5)
    curve = Load(rows, places=rows, tokens=rows, slots=200 * rows)
    drafts = [Action(TREE, nodes, padded_size(rows + nodes)) for nodes in budgets]
    assert least <= plans.choose(curve, drafts, lambda _: False).nodes / rows <= most
    world = LateWorld(
        lambda _, n: module.Promise()(n) * chance.choice([0, 1, 2]),
        rows=rows,
        promises=module.Promise(),
        budgets=budgets,
        recorded=True,
    )
    world.run(plans, 300)
    chosen = [action.nodes / rows for action in world.launched[-50:] if action.shape is not None]
    assert least <= sum(chosen) / len(chosen) <= most


def test_fewer_nodes_are_verified_where_the_likeliest_promise_nearly_all() -> None:
    """Twin: where each node promises as much as the one before, all are."""
    for promises, fewer in ((lambda n: min(n, 2.0), True), (lambda n: n / 63 * 2.0, False)):
        world = LateWorld(
            lambda _, n, p=promises: p(n), promises=promises, budgets=(1, 3, 7, 15, 31, 63), recorded=True
        )
        world.run(planner(), 600)
        assert (world.launched[-1].nodes < 31) == fewer


def test_another_number_of_nodes_is_recorded_when_it_would_have_saved_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording costs seconds. Twin: where it costs little, it is made."""
    for seconds, changes in ((2.0, False), (0.01, True)):
        monkeypatch.setattr(module, "RECORDING", seconds)
        world = LateWorld(lambda *_: 1.0, promises=lambda n: min(n, 1.0), budgets=(3, 63))
        world.recorded.add(world.actions[1])
        world.run(planner(), 400)
        assert (world.actions[0] in world.recorded) == changes


def test_a_plain_step_is_measured_after_long_drafting_unless_drafting_clearly_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain steps may be far cheaper than they seem. Twin: drafts clearly pay, and nothing is recorded."""
    monkeypatch.setattr(module, "DOUBTFUL", 5.0)
    for accepted, measured in ((0.7, True), (4.0, False)):
        world, plans = LateWorld(lambda *_, n=accepted: n), planner()
        world.run(plans, 6000)
        assert (Action(None, 0, 1) in world.recorded) == measured


def test_plain_steps_are_compared_where_drafts_do_not_clearly_pay() -> None:
    for accepted, compared in ((0.5, True), (CLEAR * 2, False)):
        world = LateWorld(lambda *_, n=accepted: n, recorded=True).run(planner(), 2000)
        assert (world.plain(last=500) > 0) == compared
        assert world.plain(last=500) < 20


def test_prices_recover_from_steps_that_others_disturb() -> None:
    """One step in ten takes fifty times as long; then none does."""
    plans = planner()
    LateWorld(lambda *_: 3, noise=0.1, recorded=True).run(plans, 2000)
    world = LateWorld(lambda *_: 3, recorded=True).run(plans, 2000)
    assert plans.seconds(world.actions[0], world.load) == pytest.approx(gpu_pass(64) + DRAFT, rel=0.05)
    assert world.plain() < 40


def test_a_drafter_without_probabilities_is_judged_by_what_it_gives() -> None:
    for accepted, used in ((2.0, True), (0.05, False)):
        world, plans = LateWorld(lambda *_, n=accepted: n, recorded=True), planner()
        world.promises = None  # type: ignore[assignment]
        world.run(plans, 600)
        drafted = sum(action.shape is not None for action in world.launched[-100:])
        assert (drafted > 90) == used, drafted


def test_rows_under_a_grammar_say_nothing_of_the_drafter() -> None:
    for guided in (False, True):
        plans, world = planner(), LateWorld(useless, recorded=True)
        world.requests[0].processor = (lambda logits, tree: logits) if guided else None  # type: ignore[assignment]
        world.run(plans, 20)
        assert (plans.trust.ratio == 1.0) == guided


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
def test_beams_are_narrower_for_more_rows(rows: int) -> None:
    for beam in beams(TREE, rows, 2):
        assert 1 <= beam.width * rows <= max(640 // 4, rows)
        assert beam.budget <= max(1, 128 // rows - 1)
    assert beams(TREE, 1) == [TREE]


@pytest.mark.parametrize("temperature", ["t0", "t1"])
def test_on_recorded_probabilities_the_choice_is_as_good_as_the_best_fixed_one(temperature: str) -> None:
    """One step late, at known prices. Twin: a planner that sees no probabilities is not."""
    best = max(at_once(temperature, 16, nodes, most=12)["speedup"] for nodes in budgets(16)[1:4])
    assert at_once(temperature, 16, None, most=12)["speedup"] > 0.98 * best
    assert at_once(temperature, 16, None, blind=True, most=12)["speedup"] < 0.98 * best
