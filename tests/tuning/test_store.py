"""Profiles on disk: written atomically, ignored when damaged, and picked up by `load` for the same combination only."""

import logging

import pytest
import torch

import redrafter
from redrafter import RuleConfig, Shape
from redrafter.cache_folder import read_json, write_json
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.errors import CacheUnavailable
from redrafter.targets import load_target
from redrafter.tuning import store
from redrafter.tuning.profile import BestShape
from redrafter.tuning.store import find_profile, profile_key, read_profile, save_profile, saved_profiles
from tests.helpers.profiles import CHAIN, TREE, make_profile
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
    again = make_profile(chain_draft=8.0)
    assert save_profile(again) == path
    assert list(saved_profiles()) == [again]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "half", "one digit"])
def test_a_damaged_profile_is_ignored_with_one_line(profiles, caplog, content):
    path = save_profile(make_profile())
    texts = {"half": path.read_text()[:100], "one digit": path.read_text().replace("8", "9", 1)}
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


@pytest.mark.parametrize("version", ["0.0.1", redrafter.__version__])
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


def save_best(shape: Shape | None, target, drafter) -> None:
    key = profile_key(target, drafter, "auto")
    save_profile(make_profile(key=key, target_name=target.name, best_shapes=(BestShape(1, shape),)))


def test_load_uses_the_profile(profiles, caplog):
    model = make_model()
    target = load_target(model)
    drafter = recurrent_drafter(target)
    assert redrafter.load(model, drafter).shape == drafter.default_shape, "nothing was tuned yet"
    save_best(TREE, target, drafter)
    engine = redrafter.load(model, drafter)
    assert (engine.drafter, engine.shape) == (drafter, TREE)
    assert redrafter.load(model, drafter, shape=CHAIN).shape == CHAIN, "an explicit shape wins"
    other_rule = redrafter.load(model, drafter, rule=RuleConfig(name="rejection"))
    assert other_rule.shape == drafter.default_shape, "profiles are for the seeded rule"
    save_best(None, target, drafter)
    with caplog.at_level(logging.INFO):
        engine = redrafter.load(model, drafter)
    assert isinstance(engine.drafter, NoDrafter)
    assert [r.message for r in caplog.records if "plain decoding" in r.message]
    assert redrafter.load(model, drafter, shape=CHAIN).drafter is drafter


def test_another_combination_has_no_profile(profiles):
    model = make_model()
    target = load_target(model)
    drafter = recurrent_drafter(target)
    save_best(TREE, target, drafter)
    assert redrafter.load(model, NgramDrafter()).shape == NgramDrafter.default_shape
    assert redrafter.load(model, recurrent_drafter(target, exit_size=32)).shape != TREE
    assert redrafter.load(make_model("qwen3"), NgramDrafter()).shape == NgramDrafter.default_shape
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert redrafter.load(model, drafter).shape != TREE
    finally:
        torch.set_num_threads(threads)
    assert redrafter.load(model, drafter).shape == TREE


def test_a_file_with_the_key_of_another_combination_is_ignored(profiles, caplog):
    """As if two keys had the same digest."""
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    key = profile_key(target, drafter, "auto")
    path = save_profile(make_profile(key=key, target_name=target.name))
    write_json(path, read_json(path) | {"key": key | {"dtype": "other"}})
    assert find_profile(target, drafter, "auto") is None
    assert "belongs to another combination" in caplog.text
