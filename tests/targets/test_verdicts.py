"""Kept verdicts: a model that passed is not checked again, until anything that the verdict depends on differs."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu import library, ops
from redrafter.targets import load_target, pretrained, verdicts
from redrafter.targets.cpu import passes
from tests.helpers.zoo import make_model

NEW = verdicts.versions()


@pytest.fixture
def model(tmp_path):
    make_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """An empty folder of verdicts, and the attention of every model that was checked."""
    seen = []
    whole = pretrained.check_with_fallback
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    monkeypatch.setattr(
        pretrained, "check_with_fallback", lambda t: (seen.append(t.config._attn_implementation), whole(t))[1]
    )
    return seen


def test_checked_once(model, checks):
    for _ in range(3):
        load_target(model, device="cpu")
    assert len(checks) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: os.utime(model / "model.safetensors", ns=(1, 1)),
        lambda model, patch: (model / "more.txt").write_text("another file"),
        lambda model, patch: (model / "config.json").write_text((model / "config.json").read_text() + " "),
        lambda model, patch: patch.setattr(verdicts, "__version__", "0.0"),
        lambda model, patch: patch.setattr(verdicts, "versions", lambda: NEW | {"torch": "0.0"}),
        lambda model, patch: patch.setattr(verdicts, "versions", lambda: NEW | {"transformers": "0.0"}),
        lambda model, patch: patch.setattr(verdicts, "CODE", ("core",)),
        lambda model, patch: [p.write_text("{") for p in verdicts.folder().iterdir()],
    ],
    ids=["time", "new file", "size", "redrafter", "torch", "transformers", "code", "damaged verdict"],
)
def test_checked_again_when_anything_differs(model, checks, monkeypatch, change):
    load_target(model, device="cpu")
    change(model, monkeypatch)
    load_target(model, device="cpu")
    assert len(checks) == 2


def test_each_dtype_is_checked(model, checks):
    load_target(model, device="cpu", dtype="fp32")
    load_target(model, device="cpu", dtype="fp64")
    assert len(checks) == 2


def test_keywords_of_from_pretrained_are_checked_every_time(model, checks):
    for _ in range(2):
        load_target(model, device="cpu", attn_implementation="eager")
    assert checks == ["eager", "eager"]


def test_a_users_own_model_is_always_checked(model, checks, monkeypatch):
    own = []
    monkeypatch.setattr(pretrained, "check", own.append)
    for _ in range(2):
        load_target(AutoModelForCausalLM.from_pretrained(model))
    assert len(own) == 2
    assert checks == []


def test_a_refusal_is_not_kept(model, checks, monkeypatch):
    def refuse(target):
        checks.append("refused")
        raise UnsupportedTarget("no")

    monkeypatch.setattr(pretrained, "check_with_fallback", refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedTarget):
            load_target(model, device="cpu")
    assert checks == ["refused"] * 2


def test_the_attention_that_passed_is_used_again(model, checks, monkeypatch):
    def fall_back(target):
        checks.append(target.config._attn_implementation)
        target.model.set_attn_implementation("eager")

    monkeypatch.setattr(pretrained, "check_with_fallback", fall_back)
    targets = [load_target(model, device="cpu") for _ in range(2)]
    assert [t.config._attn_implementation for t in targets] == ["eager", "eager"]
    assert checks == ["sdpa"]
    targets[1].release()
    assert targets[1].config._attn_implementation == "sdpa"


def test_without_a_folder_to_write_the_model_is_checked_every_time(model, checks, monkeypatch):
    monkeypatch.setattr(verdicts, "folder", lambda: verdicts.Path("/proc/redrafter"))
    for _ in range(2):
        load_target(model, device="cpu")
    assert len(checks) == 2


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler here")
def test_forward_passes_are_tried_once_and_installed_alike(model, checks, monkeypatch):
    tried = []
    whole = passes.install_cpu_forwards
    monkeypatch.setattr(passes, "install_cpu_forwards", lambda target: (tried.append(target), whole(target))[1])
    first, second = (load_target(model, device="cpu") for _ in range(2))
    replaced = [
        {name: repr(type(m.forward.__func__)) for name, m in t.model.named_modules() if "forward" in vars(m)}
        for t in (first, second)
    ]
    assert len(tried) == 1
    assert replaced[0]
    assert replaced[0] == replaced[1]
    tokens = torch.arange(1, 4)[None]
    with torch.no_grad():
        assert torch.equal(first.model(tokens).logits, second.model(tokens).logits)
    monkeypatch.setattr(library, "built", lambda: "another library")
    load_target(model, device="cpu")
    assert len(tried) == 2


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler here")
def test_forwards_from_a_kept_verdict_are_removed_on_release(model, checks):
    for _ in range(2):
        target = load_target(model, device="cpu")
        assert any("forward" in vars(m) for m in target.model.modules())
        target.release()
        assert not any("forward" in vars(m) for m in target.model.modules())
