"""The more rows, the less is guessed; never where plain decoding is as fast."""

from redrafter.config import Shape
from redrafter.engine.profile import Guessed, Profile, Stepped
from redrafter.runtime.batch import Batch
from redrafter.serve import measure as measure_module
from redrafter.serve.costs import Costs
from redrafter.targets import Target
from tests.helpers.zoo import make_model, recurrent_drafter

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


def test_steps_are_timed_in_turns_even_where_the_context_is_short(monkeypatch):
    """A clock of our own: 10 for a plain step, 1 more for each node; rows are opened anew when they are full."""
    target = Target(make_model())
    shapes = [Shape(width=3, length=3), Shape(width=1, length=2)]
    batch = Batch(target, recurrent_drafter(target), rows=4, context=40, kept=1, shapes=shapes)
    opened = []
    monkeypatch.setattr(measure_module, "_steps", fake_steps)
    true = batch.open
    batch.open = lambda *a, **k: (opened.append(1), true(*a, **k))[1]
    guessed = [Guessed(shapes[0], 0.0, 2.0), Guessed(shapes[1], 0.0, 1.9)]
    stepped, choices = measure_module.measure(batch, guessed, [[1, 2, 3], [4, 5]])
    assert {(s.batch, s.shape and s.shape.budget): s.ms for s in stepped if s.batch == 1} == {
        (1, None): 10.0, (1, 9): 19.0, (1, 2): 12.0,
    }  # fmt: skip
    assert [c.shape for c in choices] == [shapes[1]] * 3
    assert len(opened) > 1 + 2 + 4, "some were full"
    assert batch.free == 4


def fake_steps(batch, shape, count):
    for _ in range(count):
        batch.step(True, shape)
    return 10.0 + (shape.budget if shape else 0)
