"""Rotations of packed weights: the bits of transformers, however far they have grown."""

import gc
import weakref

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from redrafter.kernels.cpu import library
from redrafter.targets.cpu.families import Rotations
from tests.targets.cpu.test_packed import model, packed, trees

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")


def test_rotations_grow_and_keep_their_bits():
    rotations = Rotations(model("llama").config)
    short = rotations.up_to(3)
    assert rotations.up_to(3) is short
    long = rotations.up_to(len(short[0][0]))
    assert torch.equal(long[0][0][: len(short[0][0])], short[0][0])


@pytest.mark.parametrize("rotation", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rotations_have_the_bits_of_transformers(kind, rotation):
    parameters = {"rope_type": rotation, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    if rotation == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    positions, dummy = torch.arange(5000)[None], torch.zeros(1)
    if kind == "llama":
        config = LlamaConfig(hidden_size=96, num_attention_heads=2, rope_parameters=parameters)
        theirs = [LlamaRotaryEmbedding(config)(dummy, positions)]
    else:
        local = {"rope_type": "default", "rope_theta": 1e4}
        both = {"full_attention": parameters, "sliding_attention": local}
        config = Gemma3TextConfig(head_dim=48, num_hidden_layers=6, rope_parameters=both)
        theirs = [Gemma3RotaryEmbedding(config)(dummy, positions, layers) for layers in both]
    ours = Rotations(config).up_to(4999)
    for mine, wanted in zip(ours, theirs, strict=True):
        for one, whole in zip(mine, wanted, strict=True):
            assert torch.equal(one[:5000], whole[0, :, :24])


def test_rotations_that_another_thread_replaces_stay_while_a_pass_uses_them(monkeypatch):
    """Tables grow during a pass. Without its own reference the pass would read freed memory."""
    target, seen = packed("llama"), []
    run = target.packed.lib.run_pass

    class Lib:
        def run_pass(self, *arguments):
            rotations = target._rotations
            table = weakref.ref(rotations.up_to(0)[0][0])
            rotations.up_to(len(table()))  # another thread
            gc.collect()
            seen.append(table() is not None)
            return run(*arguments)

    monkeypatch.setattr(target.packed, "lib", Lib())
    wanted = trees(packed("llama"))
    for ours, theirs in zip(trees(target)[3:], wanted[3:], strict=True):
        assert torch.equal(ours, theirs)
    assert seen
    assert all(seen)
