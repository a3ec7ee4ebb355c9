"""What `describe` says is what `load` does."""

import pytest
import torch

import redrafter
from redrafter.drafters import NoDrafter
from redrafter.engine import describe as module
from redrafter.engine import exactness
from redrafter.engine.describe import RunDescription, describe
from redrafter.targets import load_target
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.default import NAME
from redrafter.tuning import store
from tests.helpers.batches import TREE
from tests.helpers.prices import make_profile
from tests.helpers.zoo import make_model, recurrent_drafter


def same(found: RunDescription, engine: redrafter.Engine) -> None:
    plain = isinstance(engine.drafter, NoDrafter)
    assert (found.model, found.drafter) == (engine.target.name, engine.drafter.name)
    assert found.shape == (None if plain else engine.shape)
    assert (found.device, found.dtype) == (engine.target.device, engine.target.dtype)
    assert found.runtime == ("eager" if found.device.type == "cpu" else "compiled")


@pytest.mark.parametrize("drafter", ["auto", "recurrent", "ngram", "none"])
def test_the_default_is_described_without_its_weights(monkeypatch, default_target, drafter):
    engine = redrafter.load(drafter=drafter)
    monkeypatch.setattr(module, "load_target", lambda *a, **k: pytest.fail("the weights were loaded"))
    found = describe(drafter=drafter)
    same(found, engine)
    assert not found.tuned
    assert ("one C++ call a pass" in found.kernels) == isinstance(engine.target, PackedTarget)
    assert found.exactness == engine.exactness


@pytest.fixture(scope="module")
def loaded():
    return load_target()


@pytest.fixture
def default_target(monkeypatch, loaded):
    monkeypatch.setattr("redrafter.engine.engine.load_target", lambda *a, **k: loaded)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A toy model and its drafter on disk, and an empty folder of profiles."""
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path / "profiles")
    target = load_target(make_model(dtype=torch.float32))
    target.model.save_pretrained(tmp_path / "model")
    recurrent_drafter(target).save(tmp_path / "drafter", target)
    return str(tmp_path / "model"), str(tmp_path / "drafter")


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_another_model_is_described_as_it_loads(folders, dtype):
    for drafter in (folders[1], "auto", "none"):
        found = describe(folders[0], drafter, dtype=dtype)
        same(found, redrafter.load(folders[0], drafter, dtype=dtype))
    assert ("need float32" in found.kernels) == (dtype == "fp64")


def test_a_profile_is_described(folders):
    engine = redrafter.load(*folders)
    key = store.profile_key(engine.target, engine.drafter, "auto")
    assert not describe(*folders).tuned
    store.save_profile(make_profile(key=key, target_name=engine.target.name))
    found = describe(*folders)
    same(found, redrafter.load(*folders))
    assert found.tuned


def test_a_profile_of_the_default_needs_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    (tmp_path / module.FOLDER).mkdir()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not module._default_needs_weights(cpu, "auto")
    assert module._default_needs_weights(gpu, "auto"), "its exactness is found by trying"
    assert not module._default_needs_weights(gpu, "eager")
    store.save_profile(make_profile(target_name="another"))
    assert not module._default_needs_weights(cpu, "auto")
    store.save_profile(make_profile(target_name=NAME))
    assert module._default_needs_weights(cpu, "auto")


@pytest.mark.parametrize("verdict", [True, False])
def test_exactness_is_what_the_engine_promises(folders, monkeypatch, verdict):
    """Also the twin of a description that ignores the verdict."""
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: "" if verdict else "it rained")
    for drafter in ("ngram", "none"):
        found = describe(folders[0], drafter)
        assert found.exactness == redrafter.load(folders[0], drafter).exactness == ("bitwise" if verdict else "ties")
        assert ("because it rained" in found.exactness_text) != verdict
        assert found.exactness_text.startswith(f"{found.exactness}: text equals plain decoding")


def test_exactness_on_a_cpu(folders):
    assert describe(device="cpu").exactness == "bitwise"
    own = describe(device="cpu", dtype="fp32")
    for found in (own, describe(folders[0], "ngram"), describe(folders[0], "ngram", dtype="bf16")):
        assert found.exactness == "ties"
        assert "because on a CPU the last bits" in found.exactness_text
    assert "scores less than 0.25 apart" in found.exactness_text


def test_exactness_of_a_model_that_was_not_read():
    """On a GPU only a trial tells; weights that were never unpacked are not unpacked for it."""
    gpu = torch.device("cuda")
    for runtime, words in (("auto", "the first use of the model tries"), ("eager", "in the eager runtime")):
        found = module._description(NAME, NoDrafter(), TREE, False, runtime, gpu, torch.bfloat16, None)
        assert words in found.exactness_text


def test_gpu_kernels_depend_on_the_runtime():
    gpu = torch.device("cuda")
    assert "none" in module._gpu_kernels(gpu, "eager")
    assert "fused layers" in module._gpu_kernels(gpu, "graphs")
