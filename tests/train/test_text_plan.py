"""The time for training data: what is begun, given up and chosen so that it fits."""

import itertools
from types import SimpleNamespace

import pytest

from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.train.config import DistillConfig
from redrafter.train.distill import distill
from redrafter.train.text_plan import Clock, measure_step, plan_texts
from tests.helpers.letters import FILE, SMALL, make_target


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_no_shard_is_begun_after_the_time_given(target, tmp_path):
    config = DistillConfig(**vars(SMALL) | {"shard": 1})
    assert distill(target, tmp_path, config, prompts=FILE, clock=Clock(0.0)).rows == 1
    assert distill(target, tmp_path, config, prompts=FILE).rows == 4


@pytest.mark.parametrize(("seconds", "shards"), [(17, 1), (18, 2), (27, 2), (28, 3)])
def test_a_shard_is_begun_if_half_of_it_fits_into_the_time(target, tmp_path, monkeypatch, seconds, shards):
    """On this clock a shard takes 5 seconds and 5 more pass before the next: it is judged after 5, 15, 25 seconds."""
    clock = itertools.count(0, 5)
    for module in ("distill", "text_plan"):
        monkeypatch.setattr(f"redrafter.train.{module}.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    config = DistillConfig(**vars(SMALL) | {"shard": 1})
    assert distill(target, tmp_path, config, prompts=FILE, clock=Clock(seconds)).rows == shards


@pytest.mark.parametrize("finished", [0, 1])
def test_a_shard_that_takes_too_long_is_given_up(target, tmp_path, monkeypatch, finished):
    """On this clock a second passes whenever it is read."""
    clock = itertools.count()
    config = DistillConfig(**vars(SMALL) | {"shard": 1})
    if finished:
        distill(target, tmp_path, config, prompts=FILE, clock=Clock(0.0))
    monkeypatch.setattr("redrafter.train.text_plan.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    limited = Clock(1e9, 1.0)
    if finished:
        assert distill(target, tmp_path, config, prompts=FILE, clock=limited).rows == 1
    else:
        with pytest.raises(ConfigError, match="no training text was finished within 1 s: give more --minutes"):
            distill(target, tmp_path, config, prompts=FILE, clock=limited)


def test_when_the_time_is_over_the_prompts_there_are_will_do(target, tmp_path):
    config = DistillConfig(**vars(SMALL) | {"shard": 10, "batch": 1})
    made = distill(target, tmp_path, config, self_prompt=True, clock=Clock(0.0))
    assert 1 <= made.rows < 10
    assert distill(target, tmp_path, config, self_prompt=True, clock=Clock(0.0)) == made, "it is as it is"


def test_texts_that_fit_are_chosen_from_the_speed(target, tmp_path, monkeypatch):
    config = DistillConfig(batch=4)
    monkeypatch.setattr("redrafter.train.text_plan.measure_step", lambda *_: 0.05)
    fitted = plan_texts(target, tmp_path, config, 10.0, own=True)
    assert (fitted.tasks, fitted.prompt_tokens, fitted.shard) == (0, 64, 4)
    assert 30 <= fitted.max_new_tokens <= 36
    assert plan_texts(target, tmp_path, config, 10_000.0, own=True) == DistillConfig(batch=4, shard=104)
    given = plan_texts(target, tmp_path, config, 10.0, own=False)
    assert (given.tasks, given.prompt_tokens, given.max_new_tokens) == (50, 128, 99)
    with pytest.raises(ConfigError, match=r"--minutes is too short: .* takes 0.05 s, .* give --minutes 0\.\d+ or more"):
        plan_texts(target, tmp_path, config, 1.0, own=True)
    distill(target, tmp_path, SMALL, prompts=FILE)
    again = plan_texts(target, tmp_path, config, 10.0, own=True)
    assert (again.max_new_tokens, again.prompt_tokens, again.shard) == (9, 24, 4), "as the folder was begun"


def test_speed_is_measured(target, monkeypatch):
    written = []
    monkeypatch.setattr("redrafter.train.text_plan._write", lambda target, rows, tokens: written.append((rows, tokens)))
    assert measure_step(target, 3, 10.0) < 0.1
    assert written == [(3, 2), (3, 4), (3, 16), (3, 64)]
