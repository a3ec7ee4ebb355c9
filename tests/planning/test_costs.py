"""Prices follow the steps, not the other programs on the machine."""

import pytest

from redrafter.planning.costs import ON_CPU, Costs
from redrafter.planning.linear import LinearPrice


def test_the_first_measurement_sets_the_unit():
    price = LinearPrice([1.0, 0.5])
    assert not price.known
    price.learn([1, 0], 0.2)
    assert price.known
    assert price([1, 1]) == pytest.approx(0.3)


def test_prices_follow_the_steps_and_not_one_that_was_disturbed():
    """Twin: a change that stays is followed."""
    costs = Costs()
    for i in range(300):
        costs.learn_pass(0.01 if i != 250 else 9.0, 1)
        costs.learn_pass(0.018, 4)
    assert costs.of_pass(1) == pytest.approx(0.01, rel=0.05)
    assert costs.of_pass(4) == pytest.approx(0.018, rel=0.05)
    for _ in range(60):
        costs.learn_pass(0.02, 1)
        costs.learn_pass(0.036, 4)
    assert costs.of_pass(1) == pytest.approx(0.02, rel=0.1)


def test_quite_other_prices_are_known_after_a_few_steps():
    costs = Costs()
    costs.learn_pass(0.01, 1)
    for _ in range(5):
        costs.learn_draft(0.004, 1, 1, 2)
        costs.learn_draft(0.006, 1, 1, 4)
        costs.learn_pass(0.03, 4)
    assert costs.of_draft(1, 1, 4) == pytest.approx(0.006, rel=0.2)
    assert costs.of_pass(4) > 0.024


def test_each_part_of_a_draft_has_its_price():
    costs = Costs()
    for i in range(400):
        levels, sampled, width = 1 + i % 4, i % 2, 1 + i % 3
        seconds = 0.001 + levels * (0.002 + 0.0005 * (width - 1) + 0.001 * sampled)
        costs.learn_draft(seconds, 1, width, levels, sampled)
    assert costs.of_draft(1, 1, 3) == pytest.approx(0.007, rel=0.1)
    assert costs.of_draft(1, 3, 3, 1) == pytest.approx(0.013, rel=0.1)


def test_before_the_first_draft_its_price_follows_the_pass():
    costs = Costs()
    costs.learn_pass(0.01, 1)
    assert 0.0005 < costs.of_draft(1, 1, 1) < 0.005


def test_a_pass_over_more_tokens_never_costs_less():
    costs = Costs()
    costs.learn_pass(0.01, 1)
    assert all(costs.of_pass(n) < costs.of_pass(n + 1) for n in range(1, 40))
    for tokens, nodes in ((4, 3), (4, 9), (ON_CPU.knots[0], 1), (30, 2)):
        assert costs.more(tokens, nodes) == pytest.approx(costs.of_pass(tokens + nodes) - costs.of_pass(tokens))


def test_a_time_too_short_for_the_clock_is_no_measurement():
    """A clock of coarse steps may say 0, of the first step too."""
    costs = Costs()
    for seconds in (0.0, -1e-9):
        costs.learn_pass(seconds, 1)
        assert not costs.known
    costs.learn_pass(0.01, 1)
    saved = costs.saved()
    costs.learn_pass(0.0, 1)
    assert costs.saved() == saved
