"""What a planner decides: as fast as the guesses allow, and never much slower than plain decoding."""

import itertools
import statistics

import pytest

from benchmarks.planned import PRICES, of_planner, of_threshold
from redrafter.planning import planner as module
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.plan import Drafted, Plan
from redrafter.planning.planner import COMPARE_EVERY, Planner
from redrafter.runtime.copied import Copied
from tests.helpers.planning import World, make_planner, make_row


def test_drafts_that_are_wrong_cost_little():
    for said in (0.01, 0.4, 0.95):
        world = World(skill=0.0, said=said)
        plans = world.run(make_planner(), 2000)
        drafted = [plan.shape is not None for plan in plans]
        assert world.speedup > 0.97, said
        assert 0 < sum(drafted[-500:]) < 50, "the drafter is tried again now and then"


def test_drafts_that_are_right_are_used():
    world = World(skill=0.9)
    plans = world.run(make_planner(), 1000)
    assert sum(plan.shape is not None for plan in plans) > 0.9 * len(plans)
    assert world.speedup > 1.7


def test_a_draft_that_costs_more_than_it_gives_is_given_up():
    planner = make_planner()
    World(skill=0.6, level=0.9).run(planner, 400)
    late = World(skill=0.6, level=0.9)
    late.run(planner, 1000)
    assert late.speedup > 0.985


def test_a_draft_that_became_cheaper_is_found_out():
    planner = make_planner()
    World(skill=0.7, level=0.5).run(planner, 300)
    world = World(skill=0.9)
    world.run(planner, 2000)
    plans = world.run(planner, 300)
    assert sum(plan.shape is not None for plan in plans) > 0.8 * len(plans)


def test_the_nodes_of_a_drafter_that_says_too_much_become_few():
    """Twin: those of one that is as good as it says stay."""
    for skill, trusted in ((0.3, False), (0.9, True)):
        planner = make_planner()
        plans = World(skill=skill, said=0.9).run(planner, 1500)
        drafted = [plan.nodes for plan in plans[-300:] if plan.shape is not None]
        assert (planner.trust.ratio > 0.9) == trusted
        assert (sum(drafted) > 2 * len(drafted)) == trusted


def test_a_draft_goes_as_far_as_its_path_is_likely():
    far, near = (World(skill=said, node=0.05, level=0.03).run(make_planner(), 600)[-50:] for said in (0.95, 0.6))
    mean = [statistics.fmean(plan.levels for plan in plans if plan.shape is not None) for plans in (near, far)]
    assert mean[0] + 0.5 < mean[1]


def test_repeated_text_is_copied_in_long_chains():
    world = World(skill=0.0, period=30)
    plans = world.run(make_planner(), 600)
    assert max(len(copied.tokens) for plan in plans for copied in plan.copied.values()) == MOST_COPIED
    assert world.speedup > 2
    alone, again = Planner(None, copies=True), World(skill=1.0, period=30)
    assert all(plan.shape is None for plan in again.run(alone, 600)), "n-grams alone have no network to ask"
    assert again.speedup > 2


def test_texts_tell_the_next_ones_how_much_to_trust_a_match():
    """In some texts the end of a match says little. Twin: where matches go on, the next text copies at once."""
    for trusted in (False, True):
        planner = make_planner()
        for _ in range(6):
            row = make_row([3, 1, 2])
            planner.open(row, row.ids, sampled=False)
            source = planner.rows[row].source
            for step in range(40):
                source.look_up(9)
                source.take([3 if trusted else 10 + step, 1, 2])
            planner.close(row)
        assert (planner.copied > 1.0) == trusted
        row = make_row([1, 2, 3, 1, 2])
        planner.open(row, row.ids, sampled=False)
        assert (planner.rows[row].source.look_up(9).odds[0] > 0.5) == trusted


def known(planner: Planner, node: float = 0.15) -> Planner:
    """The planner after steps that told it the price of nodes."""
    for nodes in (0, 1, 3, 8, 12) * 40:
        planner.costs.learn_pass(0.01 * (1 + node * nodes), 1 + nodes)
    return planner


def test_a_chain_ends_where_the_text_must():
    planner, row = known(make_planner()), make_row([1, 2, 3, 4] * 4)
    planner.shape = None
    planner.open(row, row.ids, sampled=False)
    assert planner.choose({row: 3}).copied == {row: Copied([1, 2])}
    assert planner.choose({row: 1}).copied == {}


def test_many_rows_decode_plainly_where_each_token_costs_its_whole_share(monkeypatch):
    monkeypatch.setattr(module, "TRIALS", 1e-9)
    monkeypatch.setattr(module, "PER_TEXT", 0.0)
    planner = known(make_planner(), node=0.9)
    rows = [make_row([1, 2, 3, 4] * 4) for _ in range(9)]
    for row in rows:
        planner.open(row, row.ids, sampled=False)
    for _ in range(60):
        plan = planner.choose(dict.fromkeys(rows, 50))
        assert (plan.shape, plan.copied) == (None, {})
        planner.learn(plan, {row: [9] for row in rows}, (0.0, 0.082))
    cheap = known(Planner(None, copies=True), node=0.05)
    cheap.rows = planner.rows
    for row in rows:
        planner.rows[row].source.take([1, 2, 3, 4])
    assert len(cheap.choose(dict.fromkeys(rows, 50)).copied) == 9, "twin: the text of plain steps is known"


def test_only_rows_that_repeat_themselves_are_copied_for():
    planner = known(Planner(None, copies=True))
    rows = [make_row([1, 2, 3, 4] * 4), make_row(list(range(10, 26)))]
    for row in rows:
        planner.open(row, row.ids, sampled=False)
    assert planner.choose(dict.fromkeys(rows, 50)).copied.keys() == {rows[0]}


def test_a_plain_step_is_taken_now_and_then_to_compare():
    plans = World(skill=0.9).run(make_planner(), 600)
    plain = [i for i, plan in enumerate(plans) if plan.shape is None and not plan.copied]
    assert plain[0] == 0
    assert all(b - a <= COMPARE_EVERY + 1 for a, b in itertools.pairwise(plain))


def test_drafts_that_cost_far_more_than_they_give_are_tried_seldom():
    for level in (0.5, 1.0, 3.0):
        planner = make_planner(copies=False)
        World(skill=0.5, level=level).run(planner, 500)
        late = World(skill=0.5, level=level)
        assert any(plan.shape for plan in late.run(planner, 6000)), "tried again"
        assert late.speedup > 0.985


def test_a_row_with_a_grammar_says_nothing_of_the_drafter():
    """Twin: another row does."""
    for learns in (False, True):
        planner, row = known(make_planner()), make_row([1, 2, 3, 4] * 4)
        planner.open(row, row.ids, sampled=False, copies=False, learns=learns)
        plan = Plan(drafted={row: Drafted({1: (0, 5)}, [1.0, 0.9])}, reached={row: [0.9]})
        planner.learn(plan, {row: [9]}, None)
        planner.close(row)
        planner.close(row)
        assert (planner.trust.ratio < 1.0) == learns


def test_a_twin_with_the_same_past_decides_the_same():
    one, other = (World(0.5, period=40).run(make_planner(), 500) for _ in range(2))
    assert [(p.shape, [*p.copied.values()]) for p in one] == [(p.shape, [*p.copied.values()]) for p in other]


@pytest.mark.parametrize("temperature", ["t0", "t1"])
def test_on_recorded_probabilities_the_planner_is_as_good_as_the_best_threshold(temperature):
    """At known prices. Twin: a planner that sees no probabilities is not."""
    prices = PRICES["measured"]
    best = max(of_threshold(temperature, prices, least) for least in (0.25, 0.3, 0.35, 0.4))
    assert of_planner(temperature, prices)["speedup"] > 0.98 * best
    assert of_planner(temperature, prices, blind=True)["speedup"] < 0.98 * best
