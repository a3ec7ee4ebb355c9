"""A profile with made-up costs whose best shapes are known."""

import dataclasses
from typing import Any

from redrafter.config import Shape
from redrafter.tuning.profile import BestShape, DraftCost, Profile, SimulatedShape, StepCost, VerifyCost

CHAIN, TREE = Shape(width=1, length=3, nodes=3), Shape(width=2, length=4, nodes=7)


def make_profile(chain_draft: float = 1.0, node: float = 1.0, **changes: Any) -> Profile:
    """Plain decoding takes 10 ms a step, each node more; the tree has more tokens/step than the chain."""
    verify_costs = tuple(VerifyCost(rows, n, 10 + rows * node * n) for rows in (1, 8) for n in (0, 3, 7))
    draft_costs = tuple(
        cost for rows in (1, 8) for cost in (DraftCost(rows, 1, 3, chain_draft), DraftCost(rows, 2, 4, 3.0))
    )
    made = Profile(
        key={"target": "made up"},
        target_name="made/up",
        temperature=0.0,
        verify_costs=verify_costs,
        draft_costs=draft_costs,
        simulated=(SimulatedShape(CHAIN, 0.0, 2.0), SimulatedShape(TREE, 0.0, 2.5)),
    )
    shapes = (None, CHAIN, TREE)
    step_costs = tuple(StepCost(rows, shape, made.component_ms(shape, rows)) for rows in (1, 8) for shape in shapes)
    made = dataclasses.replace(made, step_costs=step_costs)
    best_shapes = tuple(BestShape(rows, made.fastest_measured(rows)) for rows in (1, 8))
    return dataclasses.replace(made, **({"best_shapes": best_shapes} | changes))
