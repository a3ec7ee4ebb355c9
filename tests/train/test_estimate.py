"""What a run would take: from measured speeds by arithmetic, from recorded runs as their files say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redrafter.drafters.options import DrafterOptions
from redrafter.targets import Target
from redrafter.train import estimate as module
from redrafter.train import least, text_plan
from redrafter.train.config import DistillConfig, TrainConfig
from redrafter.train.estimate import RECORDED, Measured, Plan, estimate, longest_text, measure
from tests.helpers.clock import Clock
from tests.helpers.toys import CONFIG, OPTIONS
from tests.helpers.zoo import make_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SPEEDS = Measured(rows=10, step=0.05, position=0.001, peak=0, seconds=7.0)
DATA = DistillConfig(texts=1000, max_new_tokens=200, prompt_tokens=100, tasks=0)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(dtype=torch.float32))


def plan_of(target: Target, config: TrainConfig = CONFIG, options: DrafterOptions = OPTIONS, **more) -> Plan:
    return Plan(options, config, options.config_for(target), **more)


def test_times_follow_from_speeds(target: Target) -> None:
    """100 rounds of 300 tokens at 0.05 s; 8 million positions at a millisecond."""
    config = TrainConfig(updates=1000, positions=8000)
    lines = estimate(target, plan_of(target, config, data=DATA, texts=1000), SPEEDS)
    assert "7 s of measuring" in lines[0]
    assert lines[1] == "data: about 25.0 minutes at most for 1000 texts, 10 at once"
    assert lines[2] == "training: about 2.2 hours for 1000 updates of 8000 positions, without simulations"
    slower = estimate(target, plan_of(target, config, data=DATA, texts=1000), replace(SPEEDS, position=0.002))
    assert "4.4 hours" in slower[2]


def test_minutes_bound_the_time_and_say_what_is_learned(target: Target) -> None:
    """A third for the data, three tenths of the rest for simulations; finished data leaves it all to training."""
    config = TrainConfig(minutes=100)
    assert "from about 2.8 M positions" in estimate(target, plan_of(target, config, data=DATA, texts=9), SPEEDS)[1]
    assert "from about 4.2 M positions" in estimate(target, plan_of(target, config), SPEEDS)[1]


@pytest.mark.parametrize(
    ("updates", "said"),
    [(10, "less than 2.49"), (300, "about 2.49"), (3000, "about 4.4 "), (8000, "about 4.96")],
)
def test_tokens_per_step_are_those_of_the_longest_recorded_run_that_fits(target, updates, said) -> None:
    line = estimate(target, plan_of(target, TrainConfig(updates=updates)), SPEEDS)[-1]
    assert said in line
    assert "a recorded run" in line
    start = plan_of(target, TrainConfig(updates=updates), init_from=Path("before"))
    assert estimate(target, start, SPEEDS)[-1].endswith("no run from another drafter is recorded")


def test_recorded_runs_are_in_the_results() -> None:
    """Each figure is the last one on held-out texts of a run of that kind and length in the file it names."""
    for run in RECORDED:
        rows = json.loads((RESULTS / run.file).read_text())["rows"]
        figures = []
        for row in rows:
            tried = [r["held_out"] | {"updates": r["update"]} for r in row.get("journal", ()) if "held_out" in r]
            if "held_out" in row and run.kind == row.get("drafter", "recurrent"):
                tried.append(row["held_out"] | {"updates": row["updates"]})
            figures += [round(t["tokens_per_step"], 2) for t in tried if t["updates"] * 8192 == run.positions]
        assert run.tokens_per_step in figures, run


def test_prompts_of_the_user_need_no_writing() -> None:
    own = Plan(OPTIONS, CONFIG, None, DATA, texts=1000)  # type: ignore[arg-type]
    assert longest_text(own) == 300
    assert longest_text(replace(own, prompts=1000)) == 200
    assert longest_text(replace(own, prompts=500)) == 250
    assert longest_text(replace(own, data=replace(DATA, tasks=30))) > 300


def test_measuring_stops_when_it_takes_long_enough(target: Target, monkeypatch) -> None:
    clock = Clock()
    for place in (module, least, text_plan):
        monkeypatch.setattr(place, "time", clock)
    sizes: list[int] = []

    def position(target, options, config, rows, length, init_from) -> float:
        sizes.append(rows * (length - 2))
        clock.now += 0.01 * sizes[-1]
        return 0.01

    monkeypatch.setattr(module, "measure_position", position)
    plan = plan_of(target, replace(CONFIG, positions=8192), data=DATA, texts=3)
    measured = measure(target, plan, enough=5.0)
    assert sizes == [64, 256, 1024]
    assert (measured.rows, measured.position) == (3, 0.01)
    assert 0 < measured.step < 0.001, "a look at the clock is a millisecond, for several tokens"
    assert 13.4 < measured.seconds < 14
    sizes.clear()
    measure(target, plan, enough=50.0)
    assert sizes == [64, 256, 1024, 4096]
