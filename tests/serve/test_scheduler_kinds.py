"""Rows with a logits processor or a grammar beside free ones: what the scheduler learns, and which rows step together."""

from typing import Any

import pytest

from redrafter import Engine
from redrafter.config import Shape
from redrafter.drafters import NoDrafter
from redrafter.targets import Target
from tests.helpers.letters import make_target
from tests.serve.test_scheduler import jobs_of, make, run


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_the_chooser_learns_from_free_rows_only(target: Target) -> None:
    scheduler = make(target)
    learned: list[int] = []

    def learn(shape: Shape | None, tokens: float, rows: int) -> None:
        learned.append(rows)

    scheduler.costs.learn = learn  # type: ignore[method-assign]
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 1, "ignore_eos": True}
    request = Engine(target, NoDrafter()).requests([[1, 2]], **options)
    for processors in ((), (lambda ids, scores: scores,)):
        scheduler.submit([jobs_of(target, request, processors=processors)[0][0]])
    run(scheduler)
    assert set(learned) == {1}
