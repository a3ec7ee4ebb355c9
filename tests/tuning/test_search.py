"""`tune`: the best shape of a grid with made-up costs, the real thing at toy scale, and the command."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import redrafter
from redrafter import Engine, Shape
from redrafter.cli.main import main
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from redrafter.tuning import search, store
from redrafter.tuning.profile import BestShape, SimulatedShape
from redrafter.tuning.search import SearchGrid, tune
from redrafter.tuning.step_cost import DummyDrafter, TimingBudget
from tests.helpers.letters import make_target, tokenizer
from tests.helpers.profiles import make_profile
from tests.helpers.zoo import make_model, recurrent_drafter

GRID = SearchGrid((1, 2), (1, 3), (1, 3, 5), 4, 12, TimingBudget(1, 2), TimingBudget(1, 2), finalists=3)


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def fake_times(node: float, draft: float):
    """Steps that cost 10 ms, and so much for each node and each drafted token."""

    def cost(drafter, shape: Shape) -> float:
        drafted = 0 if isinstance(drafter, DummyDrafter) else shape.width * shape.length
        return 10 + node * shape.budget + draft * drafted

    return lambda batch, rows, shapes, *rest: (10.0, [cost(batch.drafter, shape) for shape in shapes])


def fake_simulation(target, drafter, texts, shapes: Sequence[Shape], temperature: float, report):
    """Wider and longer beams and more nodes give more tokens/step, each a little less than the one before."""
    return [SimulatedShape(s, temperature, 1 + 0.5 * s.length**0.5 + 0.2 * s.width + 0.05 * s.budget) for s in shapes]


@pytest.mark.parametrize(("node", "draft"), [(0.1, 0.1), (2.0, 0.1), (0.1, 3.0), (40.0, 40.0)])
def test_tuning_finds_the_best_of_the_grid(monkeypatch, node, draft):
    monkeypatch.setattr(search, "time_steps", fake_times(node, draft))
    monkeypatch.setattr(search, "simulate_shapes", fake_simulation)
    target = make_target()
    got = tune(Engine(target, recurrent_drafter(target)), row_counts=[4, 1], grid=GRID)
    rates = {
        row.shape: row.tokens_per_step / (10 + node * row.shape.budget + draft * row.shape.width * row.shape.length)
        for row in got.simulated
    }
    best = max(rates, key=rates.__getitem__)
    wanted = best if rates[best] > 1.03 / 10 else None
    assert [best.rows for best in got.best_shapes] == [1, 4]
    assert got.best_shape(1) == wanted
    for shape, rate in rates.items():
        assert got.tokens_per_second(shape, 1) == pytest.approx(1000 * rate), "few measurements estimate the whole grid"
    assert (wanted is None) == (node == 40.0)


def test_tuning_for_real():
    """Toy scale: everything is measured, whatever comes out."""
    target = make_target()
    for drafter in (recurrent_drafter(target), NgramDrafter()):
        stages: list[str] = []

        def report(stage: str, done: int, total: int, stages: list[str] = stages) -> None:
            assert 0 <= done <= total
            stages.append(stage)

        got = tune(Engine(target, drafter), grid=GRID, prompts=["why is it so", "who"], progress=report)
        assert got.best_shape(1) in {None, *(row.shape for row in got.simulated)}
        assert all(row.tokens_per_step >= 1 for row in got.simulated)
        assert list(dict.fromkeys(stages)) == [
            "writing texts", "tokens/step", "component costs, 1 row", "best shapes, 1 row",
        ]  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to tune"):
        tune(Engine(target, NoDrafter()))
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        tune(Engine(target, NgramDrafter()), row_counts=[0])


def toy_folders(folder):
    target = load_target(make_model(dtype=torch.float32), tokenizer=tokenizer())
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    recurrent_drafter(target).save(folder / "drafter", target)
    return ["--model", str(folder / "model"), "--drafter", str(folder / "drafter")]


def test_command(capsys, tmp_path, profiles, monkeypatch):
    monkeypatch.setattr(search, "QUICK_CPU_GRID", GRID)
    where = toy_folders(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "why is it so"}\n{"prompt": "who are we"}\n')
    assert main(["tune", *where, "--quick", "--batch", "1", "2", "--prompts", str(prompts)]) == 0
    out = capsys.readouterr().out
    for word in ("plain", "3x3:5", "tokens/s", "speedup", "1 row:", "2 rows:", "saved to"):
        assert word in out
    [profile] = store.saved_profiles()
    assert [best.rows for best in profile.best_shapes] == [1, 2]
    assert main(["generate", *where, "--max-new-tokens", "4", "hi"]) == 0
    assert main(["eval", *where, "--questions", str(prompts), "--max-new-tokens", "4"]) == 0
    assert "3x3:5" in capsys.readouterr().out, "eval uses the drafter's default shape, not the profile"
    assert main(["doctor"]) == 0
    assert "model with recurrent in float32" in " ".join(capsys.readouterr().out.split())
    assert main(["tune", *where, "--batch", "0"]) == 2
    assert main(["tune", *where, "--drafter", "none"]) == 2


def test_a_shape_on_the_command_line_wins_over_a_profile(capsys, tmp_path, profiles):
    where = toy_folders(tmp_path)
    engine = redrafter.load(where[1], where[3])
    key = store.profile_key(engine.target, engine.drafter, "auto")
    store.save_profile(make_profile(key=key, target_name=engine.target.name, best_shapes=(BestShape(1, None),)))
    assert main(["generate", *where, "--max-new-tokens", "4", "--width", "2", "hi"]) == 0
    assert "plain decoding" not in capsys.readouterr().err
    assert isinstance(redrafter.load(where[1], where[3]).drafter, NoDrafter)


def test_interrupted_tuning_leaves_nothing(capsys, tmp_path, profiles, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "time_steps", interrupted)
    monkeypatch.setattr(search, "QUICK_CPU_GRID", GRID)
    assert main(["tune", *toy_folders(tmp_path), "--quick"]) == 130
    assert not profiles.exists()


def test_wrong_arguments():
    engine = Engine(make_target(), NgramDrafter())
    for call, says in (
        (lambda: tune(5), "engine must be of type TunableEngine, got 5"),
        (lambda: tune(engine, row_counts=2), "row_counts must be a list, got 2"),
        (lambda: tune(engine, row_counts=[]), "row_counts must have a length of at least 1"),
        (lambda: tune(engine, row_counts=["1"]), "row_counts[0] must be a whole number, got '1'"),
        (lambda: tune(engine, temperature=math.nan), "temperature must be a number, got nan"),
        (lambda: tune(engine, prompts="abc"), "prompts must be a list, got 'abc'"),
        (lambda: tune(engine, prompts=[5]), "prompts[0] must be text, got 5"),
        (lambda: tune(engine, grid=5), "grid must be of type SearchGrid, got 5"),
        (lambda: tune(engine, progress=5), "progress must be a function, got 5"),
        (lambda: replace(GRID, widths=()), "widths must have a length of at least 1"),
        (lambda: replace(GRID, finalists=0), "finalists must be at least 1, got 0"),
        (lambda: TimingBudget(turns=0, steps=1), "turns must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            call()
