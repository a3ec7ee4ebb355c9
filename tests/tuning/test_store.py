"""Profiles on disk: written atomically, ignored when damaged, and used for the same combination only."""

import logging
import math

import pytest
import torch

import redrafter
from redrafter import RuleConfig
from redrafter.cache_folder import read_json, write_json
from redrafter.cli.doctor import describe_profile
from redrafter.drafters import NgramDrafter
from redrafter.errors import CacheUnavailable, ConfigError
from redrafter.planning.costs import ON_GPU, Costs
from redrafter.targets import load_target
from redrafter.tuning import store
from redrafter.tuning.store import find_profile, profile_key, read_profile, save_profile, saved_profiles
from tests.helpers.batches import CHAIN
from tests.helpers.prices import make_profile
from tests.helpers.zoo import make_model, recurrent_drafter


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def test_a_saved_profile_is_read_back(profiles):
    made = make_profile()
    path = save_profile(made)
    assert read_profile(path) == made
    assert [p.name for p in profiles.iterdir()] == [path.name], "no scratch file is left"
    again = make_profile(seconds=0.02)
    assert save_profile(again) == path
    assert list(saved_profiles()) == [again]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "half", "one digit"])
def test_a_damaged_profile_is_ignored_with_one_line(profiles, caplog, content):
    path = save_profile(make_profile())
    texts = {"half": path.read_text()[:100], "one digit": path.read_text().replace("1", "7", 1)}
    path.write_text(texts.get(content, content))
    check_ignored(path, caplog)


@pytest.mark.parametrize("content", [{}, [1], {"version": store.PROFILE_VERSION, "odd": 1}])
def test_an_odd_profile_is_ignored_with_one_line(profiles, caplog, content):
    path = save_profile(make_profile())
    write_json(path, content)
    check_ignored(path, caplog)


def check_ignored(path, caplog):
    with caplog.at_level(logging.INFO):
        assert read_profile(path) is None
    assert len(caplog.records) == 1
    assert "is damaged" in caplog.text
    assert "run redrafter tune again" in caplog.text


@pytest.mark.parametrize("version", ["0.0.1", f"{redrafter.__version__}, format 2"])
def test_a_profile_of_another_version_or_format_is_ignored_with_one_line(profiles, caplog, version):
    path = save_profile(make_profile(version=version))
    assert read_profile(path) is None
    assert len(caplog.records) == 1
    assert f"was written by redrafter {version} and is ignored" in caplog.text


def test_a_folder_that_is_not_writable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path / "file" / "profiles")
    with pytest.raises(CacheUnavailable, match="cannot write the profile"):
        save_profile(make_profile())


def save_for(target, drafter, **changes) -> None:
    save_profile(make_profile(key=profile_key(target, drafter, "auto"), target_name=target.name, **changes))


def of_pass(engine: redrafter.Engine) -> float | None:
    """Seconds of a pass over one token, if it is known."""
    assert engine.planner is not None
    return engine.planner.costs.of_pass(1) if engine.planner.costs.known else None


def test_an_engine_begins_with_the_prices_of_its_combination(profiles):
    model = make_model()
    target = load_target(model)
    drafter = recurrent_drafter(target)
    assert of_pass(redrafter.load(model, drafter)) is None, "nothing was tuned yet"
    save_for(target, drafter)
    assert of_pass(redrafter.load(model, drafter)) == pytest.approx(0.01)
    assert redrafter.load(model, drafter, shape=CHAIN).planner is None, "a given shape is drafted in every step"
    assert redrafter.load(model, drafter, rule=RuleConfig(name="rejection")).planner is None
    assert of_pass(redrafter.load(model, NgramDrafter())) is None
    assert of_pass(redrafter.load(model, recurrent_drafter(target, exit_size=32))) is None
    assert of_pass(redrafter.load(make_model("qwen3"), drafter)) is None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert of_pass(redrafter.load(model, drafter)) is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.01, 5000.0, "price", "short", "kinds"])
def test_prices_that_cannot_be_are_ignored_with_one_line(profiles, caplog, wrong):
    """Twin: what was saved is taken, see above."""
    target = load_target(make_model())
    drafter, prices = recurrent_drafter(target), make_profile().prices
    passes = {"price": (0.01, 1.0, 99.0, 1.0, 1.0, 1.0), "short": (0.01, 1.0), "kinds": (0.01,)}.get(
        wrong, (wrong, *prices["passes"][1:])
    )
    save_for(target, drafter)
    (path,) = profiles.iterdir()
    write_json(path, read_json(path) | {"prices": {"odd": passes} if wrong == "kinds" else prices | {"passes": passes}})
    with caplog.at_level(logging.INFO):
        assert of_pass(redrafter.load(target.model, drafter)) is None
    assert len(caplog.records) == 1
    assert "run redrafter tune again" in caplog.text


@pytest.mark.parametrize("prices", [{}, {"passes": (0.01, 1.0)}, {"passes": (0.01,), "drafts": (0.01, 1.0)}])
def test_a_profile_without_its_prices_is_none(prices):
    with pytest.raises(ConfigError, match="prices"):
        make_profile(prices=prices)


def test_doctor_says_what_a_token_costs():
    """The unit times its price; twin: the unit alone."""
    prices = {"passes": (0.01, 1.5, 1.0), "drafts": (0.01, 1.0)}
    key = {"drafter": "ngram 3", "dtype": "float32", "device": "cpu"}
    assert describe_profile(make_profile(prices=prices, key=key)).endswith(": 15 ms a token")


def test_prices_of_another_kind_of_device_are_refused():
    with pytest.raises(ConfigError, match="5 prices for 6 features"):
        Costs(ON_GPU).restore(make_profile().prices)


def test_a_file_with_the_key_of_another_combination_is_ignored(profiles, caplog):
    """As if two keys had the same digest."""
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    key = profile_key(target, drafter, "auto")
    path = save_profile(make_profile(key=key, target_name=target.name))
    write_json(path, read_json(path) | {"key": key | {"dtype": "other"}})
    assert find_profile(target, drafter, "auto") is None
    assert "belongs to another combination" in caplog.text
