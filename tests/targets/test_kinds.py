"""Kinds of attention besides full and sliding: chunks, indexed keys, queries that are scaled by their position."""

import pytest
import torch

from benchmarks.architectures import build, compared
from benchmarks.tiny_configs import tiny_config
from redrafter.core.cache import slot_positions, tree_visibility
from redrafter.core.flat import of_trees
from redrafter.core.tree import pack_beam
from redrafter.errors import UnsupportedTarget
from redrafter.kernels.tree_attention.naive import visible
from redrafter.targets import by_position, load_target
from redrafter.targets.attention import CHUNKED, AttentionPlan
from redrafter.targets.hf_cache import HFCacheLayer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama4():
    """Llama 4's text model with chunks of 6 tokens and scaled queries, and transformers' own texts."""
    return build("llama4_text")


@pytest.fixture(scope="module")
def indexed():
    """GLM-5, which selects 5 keys, and transformers' own texts."""
    return build("glm_moe_dsa")


@pytest.mark.parametrize("name", ["llama4", "indexed"])
def test_equals_transformers(name, request):
    model, texts = request.getfixturevalue(name)
    row = compared(load_target(model), texts)
    assert row["result"] == "equal"
    assert row["tokens_per_step"] > 1.3, "trees are verified and accepted"


@pytest.mark.parametrize("off", [-1, 1])
def test_a_chunk_one_token_off_is_another_text(llama4, off):
    """A twin."""
    model, texts = llama4
    target = load_target(model)
    target.attention.chunk += off
    assert compared(target, texts)["result"] == "wrong"


def test_an_indexer_that_sees_a_siblings_key_is_refused(indexed, monkeypatch):
    """A twin: nodes of a tree select by each other's keys."""
    update = HFCacheLayer.update_indexer

    def swapped(self, keys):
        whole = update(self, keys).clone()
        if self.slots.shape[1] > 2:
            one, other = self.slots[0, -1], self.slots[0, -2]
            whole[:, [one, other]] = whole[:, [other, one]]
        return whole

    monkeypatch.setattr(HFCacheLayer, "update_indexer", swapped)
    model, _ = indexed
    monkeypatch.delitem(_checked(), model, raising=False)
    with pytest.raises(UnsupportedTarget, match="gives a tree node other logits"):
        load_target(model)


def _checked():
    from redrafter.targets import pretrained

    return pretrained._checked


def test_queries_scaled_as_one_position_later_are_refused(llama4, monkeypatch):
    """A twin."""
    model, _ = llama4
    scale = by_position._scale
    monkeypatch.setattr(by_position, "_scale", lambda module, positions, *rest: scale(module, positions + 1, *rest))
    monkeypatch.delitem(_checked(), model, raising=False)
    with pytest.raises(UnsupportedTarget, match=r"gives a tree node other logits|at far positions"):
        load_target(model)


def test_a_scaled_model_is_as_before_after_a_pass(llama4):
    model, texts = llama4
    compared(load_target(model), texts)
    attentions = by_position.scaling_attentions(model)
    assert len(attentions) == 1, "the layer without a rotary embedding"
    assert not attentions[0].q_proj._forward_hooks


def test_lines_of_chunks_are_their_masks():
    """The flat pass of a GPU sees what the padded pass sees: a tree that stands across the end of a chunk."""
    plan = AttentionPlan(tiny_config("llama4_text"))
    beam = torch.arange(24).view(2, 3, 4)
    tree, _ = pack_beam(beam, torch.tensor([40, 41]))
    lengths = torch.tensor([22, 27])
    slots = 27 + tree.nodes + 1
    node = lengths[:, None] + tree.depths
    seen = tree_visibility(lengths, tree.mask, slots)
    masks = plan.masks(seen, node, slot_positions(lengths, tree.depths, slots), torch.float64)
    flat, at = of_trees(tree, lengths, longest=100)
    lines = plan.lines(flat.lines)
    for kind in masks:
        by_lines = visible(lines[kind][0, 0], slots)[at]
        assert torch.equal(by_lines[tree.valid], (masks[kind][:, 0] == 0)[tree.valid])
    assert not torch.equal(masks[CHUNKED], masks["full_attention"])
