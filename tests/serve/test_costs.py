"""The more rows, the less is guessed; never where plain decoding is as fast."""

from redrafter.config import Shape
from redrafter.engine.profile import Guessed, Profile, Stepped
from redrafter.serve.costs import Costs

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


def simulate(costs: Costs, steps: int, excess: float) -> list[Shape | None]:
    """Four rows whose guesses bring `excess` of the tokens hoped for."""
    chosen = []
    for _ in range(steps):
        shape = costs.choose(4)
        chosen.append(shape)
        tokens = 1 + excess * (profile().tokens_per_step(shape) - 1)
        costs.learn(shape, tokens=tokens * 4, rows=4)
    return chosen


def test_guesses_that_fail_lead_to_plain_decoding_and_back():
    costs = Costs(profile())
    assert costs.choose(4) == SMALL
    assert simulate(costs, 2000, excess=0.0)[200:].count(None) > 0.97 * 1800, "one is tried now and then"
    assert simulate(costs, 2000, excess=0.0).count(None) < 2000
    assert simulate(costs, 300, excess=1.0)[-1] == SMALL


def test_disappointment_is_forgiven_but_hope_has_a_bound():
    costs = Costs(profile())
    costs.keen = 0.2
    costs.learn(None, tokens=1, rows=1)
    assert 0.2 < costs.keen < 0.201
    costs.keen = 1.4
    costs.learn(None, tokens=1, rows=1)
    assert costs.keen == 1.4


def test_a_given_shape_stays():
    assert Costs(None, BIG).choose(64) == BIG
    assert Costs(None, None).choose(1) is None
