"""The more rows, the less is guessed; never where plain decoding is as fast."""

from redrafter.config import Shape
from redrafter.engine.profile import Guessed, Profile, Stepped
from redrafter.serve.costs import EXPLORE, Costs

BIG, SMALL = Shape(width=4, length=4, nodes=7), Shape(width=1, length=2, nodes=2)


def profile() -> Profile:
    """A step costs 10 ms, and for each row 1 ms a node beyond 4 nodes in all."""

    def ms(rows: int, nodes: int) -> float:
        return 10 + max(0, rows * (nodes + 1) - 8) * 1.0

    return Profile(
        key={},
        name="",
        temperature=0.0,
        guessed=(Guessed(BIG, 0.0, 3.0), Guessed(SMALL, 0.0, 2.0)),
        stepped=tuple(
            Stepped(rows, shape, ms(rows, shape.budget if shape else 0))
            for rows in (1, 2, 4, 16)
            for shape in (None, BIG, SMALL)
        ),
    )


def test_shapes_shrink_with_the_load_down_to_plain():
    costs = Costs(profile())
    assert [costs.choose(rows) for rows in (1, 2, 4, 16)] == [BIG, SMALL, SMALL, None]
    assert costs.choose(3) == costs.choose(4), "between two measurements the larger one holds"
    assert costs.choose(99) is None


def test_never_slower_than_plain_by_the_costs_measured():
    costs = Costs(profile())
    for rows in (1, 2, 4, 16):
        assert costs.rate(costs.choose(rows), rows) >= costs.rate(None, rows)


def test_guesses_that_fail_lead_to_plain_decoding_and_back():
    costs = Costs(profile())
    for _ in range(400):
        costs.learn(BIG, tokens=1, rows=1)
    chosen = [costs.choose(1) for _ in range(3 * EXPLORE)]
    assert chosen.count(None) > 2.8 * EXPLORE
    assert BIG in chosen or SMALL in chosen, "now and then one is tried all the same"
    for _ in range(400):
        costs.learn(SMALL, tokens=2, rows=1)
    assert costs.choose(1) is not None


def test_plain_steps_teach_nothing():
    costs = Costs(profile())
    costs.learn(None, tokens=1, rows=1)
    assert costs.keen == 1.0


def test_a_given_shape_stays():
    assert Costs(None, BIG).choose(64) == BIG
    assert Costs(None, None).choose(1) is None
