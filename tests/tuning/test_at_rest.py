"""Prices of steps on a machine that does nothing else."""

import pytest
import torch

from redrafter import Engine
from redrafter.drafters import NgramDrafter, WithNgrams
from redrafter.errors import ConfigError
from redrafter.planning.late import LatePlanner
from redrafter.planning.planner import Planner
from redrafter.planning.steps import late_planner
from redrafter.runtime.recorded import RecordedSteps
from redrafter.targets import load_target
from redrafter.tuning.at_rest import tune
from tests.helpers.late import TREE
from tests.helpers.letters import make_target
from tests.helpers.zoo import make_model, recurrent_drafter


def test_tuning_measures_passes_and_drafts() -> None:
    """By the steps of texts, for each number of rows; the engine then plans with these prices."""
    target = make_target()
    engine = Engine(target, WithNgrams(recurrent_drafter(target)))
    stages: list[tuple[str, int, int]] = []
    profile = tune(engine, row_counts=[2, 1], tokens=24, progress=lambda *stage: stages.append(stage))
    assert isinstance(engine.planner, Planner)
    assert profile.prices == engine.planner.costs.saved()
    assert profile.prices["passes"][0] > 0
    assert profile.target_name == target.name
    assert stages == [("writing texts", 0, 2), ("writing texts", 1, 2)]


def test_texts_that_measure_nothing_make_no_profile() -> None:
    """Which nothing could restore."""
    engine = Engine(make_target(), NgramDrafter())
    with pytest.raises(ConfigError, match="more than 1 tokens"):
        tune(engine, tokens=1)


@pytest.mark.parametrize("sweeps", [True, False])
def test_on_a_gpu_each_step_that_may_be_chosen_is_measured(monkeypatch: pytest.MonkeyPatch, sweeps: bool) -> None:
    """With steps over fixed buffers. Twin: a planner that does not sweep records few of them."""
    target = load_target(make_model("llama", torch.float32))
    drafter = recurrent_drafter(target)
    engine = Engine(target, drafter, runtime="graphs")
    engine.recorded, engine.planner = True, late_planner(TREE.of("3x4:9"), 2)
    engine.shape = TREE.of("3x4:9")
    if not sweeps:
        monkeypatch.setattr("redrafter.tuning.at_rest.Sweep", lambda planner: planner)
    budgets: set[int | None] = set()
    launch = RecordedSteps.launch
    monkeypatch.setattr(RecordedSteps, "launch", lambda *given: (budgets.add(given[-1]), launch(*given))[1])
    tune(engine, tokens=30)
    assert isinstance(engine.planner, LatePlanner)
    assert engine.planner.costs.passes.known
    assert (budgets >= {1, 3, 4, 7, 12}) == sweeps
