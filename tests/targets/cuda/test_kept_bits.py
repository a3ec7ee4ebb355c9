"""The comparison of bits is kept on disk: for these weights, this code and this GPU, and for no others.

A CPU stands in for the GPU, and its check is counted instead of run.
"""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from redrafter.errors import UnsupportedTarget
from redrafter.targets import fingerprint as fingerprint_module
from redrafter.targets import load_target, verdicts
from redrafter.targets.cuda import verifier as verifier_module
from redrafter.targets.cuda.verifier import has_same_bits, verifier
from redrafter.targets.fingerprint import fingerprint
from tests.helpers.zoo import make_model

CPU = torch.device("cpu")
NEW = verdicts.versions()
SETTINGS = verdicts._gpu


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """An empty folder of verdicts; the verifiers whose bits were compared."""
    made = []
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    monkeypatch.setattr(verdicts, "_gpu", lambda device: {"gpu": "one"})
    monkeypatch.setattr(verifier_module, "same_bits", lambda found: not made.append(found))
    return made


@pytest.fixture
def model():
    return copy.deepcopy(make_model("llama", torch.float32))


def promised(model, compiles=True):
    return has_same_bits(verifier(load_target(model), compiles))


def test_a_verdict_is_used_for_the_same_weights(model, tried, monkeypatch):
    assert promised(model)
    monkeypatch.setattr(verifier_module, "checked_tree_target", lambda *a: pytest.fail("the passes were checked again"))
    assert promised(copy.deepcopy(model))
    assert len(tried) == 1


def one_element(model, patch):
    model.lm_head.weight.data.view(-1)[-1] += 1e-6


def two_swapped(model, patch):
    weight = model.model.layers[1].mlp.down_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def a_buffer(model, patch):
    model.model.rotary_emb.inv_freq[0] *= 2


def a_number_of_the_config(model, patch):
    model.config.rms_norm_eps *= 2


def the_forward_of_a_class(model, patch):
    original = type(model).forward
    patch.setattr(type(model), "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))


def a_global_hook(model, patch):
    patch.setitem(torch.nn.modules.module._global_forward_hooks, 0, lambda *a: None)


TWINS = {
    "one weight": one_element,
    "two rows change places": two_swapped,
    "buffer": a_buffer,
    "config": a_number_of_the_config,
    "code": lambda model, patch: patch.setattr(verdicts, "_code", lambda: "other"),
    "redrafter": lambda model, patch: patch.setattr(verdicts, "__version__", "0.0"),
    "torch": lambda model, patch: patch.setattr(verdicts, "versions", lambda: NEW | {"torch": "0.0"}),
    "triton": lambda model, patch: patch.setattr(verdicts, "versions", lambda: NEW | {"triton": "0.0"}),
    "GPU": lambda model, patch: patch.setattr(verdicts, "_gpu", lambda device: {"gpu": "another"}),
    "hook": lambda model, patch: model.model.norm.register_forward_hook(lambda *a: None),
    "forward": lambda model, patch: setattr(model.lm_head, "forward", model.lm_head.forward),
    "forward of a class": the_forward_of_a_class,
    "global hook": a_global_hook,
    "damaged verdict": lambda model, patch: [p.write_text("{") for p in verdicts.kept()],
    "forgotten": lambda model, patch: verdicts.forget(),
}


@pytest.mark.parametrize("change", TWINS.values(), ids=TWINS)
def test_twin_anything_that_differs_is_tried_again(model, tried, monkeypatch, change):
    promised(model)
    other = copy.deepcopy(model)
    change(other, monkeypatch)
    promised(other)
    assert len(tried) == 2


def test_each_way_to_compile_is_tried(model, tried):
    promised(model, compiles=True)
    promised(copy.deepcopy(model), compiles=False)
    assert len(tried) == 2


def test_classes_of_a_user_are_tried_every_time(model, tried):
    model.model.norm.__class__ = type("MyNorm", (type(model.model.norm),), {})
    for _ in range(2):
        promised(copy.deepcopy(model))
    assert len(tried) == 2


def test_only_equal_bits_are_kept(model, tried, monkeypatch):
    monkeypatch.setattr(verifier_module, "same_bits", lambda found: bool(tried.append(found)))
    for _ in range(2):
        assert not promised(copy.deepcopy(model))
    assert len(tried) == 2
    assert not verdicts.kept()


def test_a_model_whose_layers_are_fused_no_more_is_checked(model, tried, monkeypatch):
    promised(model)

    def fails(*args):
        raise UnsupportedTarget("no")

    monkeypatch.setattr(verifier_module, "TreeTarget", fails)
    assert promised(copy.deepcopy(model))
    assert len(tried) == 2


def test_without_a_gpu_nothing_is_kept(model, tried, monkeypatch):
    monkeypatch.undo()
    assert verdicts.bits_path(load_target(model), True) is None


def test_a_setting_that_cannot_be_read_means_that_nothing_is_kept(model, tried, monkeypatch):
    monkeypatch.setattr(verdicts, "_gpu", lambda device: {}["no such setting"])
    assert verdicts.bits_path(load_target(model), True) is None


def test_settings_of_a_gpu_that_change_bits_are_part_of_the_key(monkeypatch):
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    gpu = torch.device("cuda")
    usual = SETTINGS(gpu)
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", "/elsewhere")
        assert SETTINGS(gpu) == usual, "where compiled kernels are kept changes no bits"
        patch.setenv("NVIDIA_TF32_OVERRIDE", "1")
        assert SETTINGS(gpu) != usual
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert SETTINGS(gpu) != usual
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@dataclasses.dataclass
class Weights:
    """A model of one tensor."""

    x: torch.Tensor

    def named_parameters(self):
        return [("x", self.x)]

    def named_buffers(self):
        return []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.bool])
def test_every_byte_counts_and_so_does_its_place(dtype, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "CHUNK", 2)
    x = torch.arange(53).remainder(3 if dtype == torch.bool else 53).to(dtype)  # no palindrome
    found = {fingerprint(Weights(x), CPU), fingerprint(Weights(x.flip(0)), CPU), fingerprint(Weights(x[1:]), CPU)}
    for i in range(53):
        changed = x.clone()
        changed[i] = not x[i] if dtype == torch.bool else 100
        found.add(fingerprint(Weights(changed), CPU))
    assert len(found) == 56
    monkeypatch.setattr(fingerprint_module, "CHUNK", 1000)
    assert fingerprint(Weights(x.clone()), CPU) in found
    assert fingerprint(Weights(torch.stack([x, x], 1)[:, 0]), CPU) in found, "strides do not count"


def test_weights_elsewhere_have_no_fingerprint():
    assert fingerprint(Weights(torch.empty(3, device="meta")), CPU) is None
