"""A profile's estimates and choices on made-up costs with known answers."""

import dataclasses

import pytest

from redrafter import Shape
from redrafter.errors import ConfigError
from redrafter.tuning.profile import Profile, SimulatedShape, StepCost, VerifyCost
from tests.helpers.profiles import CHAIN, TREE, make_profile


def test_the_fastest_shape_is_chosen_for_each_number_of_rows():
    """One row: 2.0 tokens in 14 ms beat 2.5 in 20 and 1 in 10. Eight rows: 35 ms and 69 ms do not beat 10."""
    made = make_profile()
    assert made.tokens_per_second(CHAIN, 1) == pytest.approx(2000 / 14)
    assert made.tokens_per_second(TREE, 1) == pytest.approx(2500 / 20)
    assert made.tokens_per_second(None, 1) == pytest.approx(100)
    assert made.best_shape(1) == CHAIN
    assert made.best_shape(8) is None, "plain decoding"
    assert made.tokens_per_second(None, 8) == pytest.approx(800), "all rows together"
    assert (made.best_shape(3), made.best_shape(64)) == (CHAIN, None), "the nearest measured number of rows"


def test_the_fastest_shape_depends_on_the_costs():
    assert make_profile(chain_draft=8.0).best_shape(1) == TREE
    assert make_profile(node=10.0).best_shape(1) is None


def test_a_gain_within_the_noise_is_not_chosen():
    barely = Profile(
        key={},
        target_name="",
        temperature=0.0,
        verify_costs=(VerifyCost(1, 0, 10.0),),
        simulated=(SimulatedShape(CHAIN, 0.0, 2.0),),
        step_costs=(StepCost(1, None, 10.0), StepCost(1, CHAIN, 19.6)),
    )
    assert barely.fastest_measured(1) is None
    clearly = dataclasses.replace(barely, step_costs=(StepCost(1, None, 10.0), StepCost(1, CHAIN, 19.0)))
    assert clearly.fastest_measured(1) == CHAIN


def test_costs_between_and_beyond_the_measured_ones():
    made = make_profile()
    assert [made.verify_ms(n, 1) for n in (0, 2, 3, 5, 7, 9)] == pytest.approx([10, 12, 13, 15, 17, 19])
    assert made.step_ms(Shape(width=1, length=3), 1) == made.step_ms(CHAIN, 1), "an implicit budget is the same shape"
    with pytest.raises(ConfigError, match="no tokens/step for W=9"):
        made.tokens_per_second(Shape(width=9, length=9), 1)
    with pytest.raises(ConfigError, match="no drafting cost for W=9"):
        made.step_ms(Shape(width=9, length=9), 1)
    with pytest.raises(ConfigError, match="holds no measurements"):
        dataclasses.replace(made, best_shapes=()).best_shape(1)


def test_estimates_are_scaled_by_the_measured_plain_step():
    """Component costs without compilation, whole steps compiled and twice as fast: the tree's 20 ms become 10."""
    made = dataclasses.replace(make_profile(), step_costs=(StepCost(1, None, 5.0), StepCost(1, CHAIN, 6.0)))
    assert made.step_ms(CHAIN, 1) == 6.0, "measured"
    assert made.step_ms(TREE, 1) == pytest.approx(10.0)
    assert made.tokens_per_second(TREE, 1) / made.tokens_per_second(None, 1) == pytest.approx(2.5 / 2)
    unmeasured = dataclasses.replace(made, step_costs=())
    assert unmeasured.step_ms(TREE, 1) == pytest.approx(20.0), "no whole step was measured"
