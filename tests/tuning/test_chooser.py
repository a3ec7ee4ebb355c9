"""With more rows, smaller shapes are chosen; never one that is slower than plain decoding."""

from redrafter.config import Shape
from redrafter.tuning.chooser import ShapeChooser
from redrafter.tuning.profile import Profile, SimulatedShape, StepCost

BIG, SMALL = Shape(width=4, length=4, nodes=7), Shape(width=1, length=2, nodes=2)


def profile() -> Profile:
    """A step chooser 10 ms, and for each row 1 ms a node beyond 4 nodes in all."""

    def ms(rows: int, nodes: int) -> float:
        return 10 + max(0, rows * (nodes + 1) - 8) * 1.0

    return Profile(
        key={},
        target_name="",
        temperature=0.0,
        simulated=(SimulatedShape(BIG, 0.0, 3.0), SimulatedShape(SMALL, 0.0, 2.0)),
        step_costs=tuple(
            StepCost(rows, shape, ms(rows, shape.budget if shape else 0))
            for rows in (1, 2, 4, 16)
            for shape in (None, BIG, SMALL)
        ),
    )


def test_more_rows_lead_to_smaller_shapes_and_then_to_plain():
    chooser = ShapeChooser(profile())
    assert [chooser.choose(rows) for rows in (1, 2, 4, 16)] == [BIG, SMALL, SMALL, None]
    assert chooser.choose(3) == chooser.choose(4), "the next larger measurement counts"
    assert chooser.choose(99) is None


def test_never_slower_than_plain_by_the_costs_measured():
    chooser = ShapeChooser(profile())
    for rows in (1, 2, 4, 16):
        assert chooser.tokens_per_ms(chooser.choose(rows), rows) >= chooser.tokens_per_ms(None, rows)


def simulate(chooser: ShapeChooser, steps: int, excess: float) -> list[Shape | None]:
    """Four rows whose drafts give `excess` of the expected accepted tokens."""
    chosen = []
    for _ in range(steps):
        shape = chooser.choose(4)
        chosen.append(shape)
        tokens = 1 + excess * (profile().tokens_per_step(shape) - 1)
        chooser.learn(shape, tokens=tokens * 4, rows=4)
    return chosen


def test_rejected_drafts_lead_to_plain_decoding_and_back():
    chooser = ShapeChooser(profile())
    assert chooser.choose(4) == SMALL
    assert simulate(chooser, 2000, excess=0.0)[200:].count(None) > 0.97 * 1800, "a draft is tried now and then"
    assert simulate(chooser, 2000, excess=0.0).count(None) < 2000
    assert simulate(chooser, 300, excess=1.0)[-1] == SMALL


def test_plain_steps_raise_a_low_ratio_slowly_and_leave_a_high_one():
    chooser = ShapeChooser(profile())
    chooser.acceptance.ratio = 0.2
    chooser.learn(None, tokens=1, rows=1)
    assert 0.2 < chooser.acceptance.ratio < 0.201
    chooser.acceptance.ratio = 1.4
    chooser.learn(None, tokens=1, rows=1)
    assert chooser.acceptance.ratio == 1.4


def test_a_fixed_shape_is_always_chosen():
    assert ShapeChooser(None, BIG).choose(64) == BIG
    assert ShapeChooser(None, None).choose(1) is None
