"""Fused layers: which models have them, that they give what the model gives, and that a wrong one is not trusted."""

import copy

import pytest
import torch

from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece, of_pieces
from redrafter.kernels import norm_gate
from redrafter.targets import load_target
from redrafter.targets.cuda import fused_layer, layer_compile, layer_parts
from redrafter.targets.cuda.tree_target import TreeTarget
from tests.helpers.zoo import make_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
FUSED = ("llama", "mistral", "qwen2", "qwen2-mixed", "qwen3", "gemma3", "phi3", "olmo2")
OTHERS = ("gpt-neox", "mixtral")


def verified(verifier, target, n):
    cache = KVCache(slots=40)
    target.prefill(TOKENS, [7, 4], cache, ())
    flat = of_pieces([Piece(0, 7, TOKENS[0, :n].tolist()), Piece(1, 4, TOKENS[1, :n].tolist())], verifier.longest)
    return [x.view(2, n, -1) for x in verifier.run(flat, cache, (0, 1, -1))]


def own(target, n):
    """The same by the model's own forward."""
    depths, lengths, slot = torch.arange(n).expand(2, -1), torch.tensor([7, 4]), torch.arange(40)
    cache = KVCache(slots=40)
    target.prefill(TOKENS, [7, 4], cache, ())
    at = lengths[:, None] + depths
    return target.forward(TOKENS[:, :n], at, at, slot <= at[:, :, None], slot.expand(2, -1), cache, (0, 1, -1))


def fused(target):
    """The modules whose forwards are replaced."""
    return {m for m, _ in TreeTarget(target).forwards.forwards}


@torch.no_grad()
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_model_gives_its_own_logits_and_states(kind):
    target = load_target(copy.deepcopy(make_model(kind, torch.float32)))
    model = target.model.model
    assert fused(target) == {*model.layers, model.rotary_emb, model.norm, target.output_embedding}
    for got, want in zip(verified(TreeTarget(target), target, 5), own(target, 5), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_keep_their_own_forward(kind):
    assert not fused(load_target(copy.deepcopy(make_model(kind, torch.float32))))


@pytest.mark.parametrize(("module", "part"), [(norm_gate, "add_norm"), (fused_layer, "gated_product")])
def test_twin_a_wrong_kernel_is_not_trusted(module, part, monkeypatch):
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)))
    right = getattr(module, part)
    monkeypatch.setattr(module, part, lambda *args, **kw: right(*args, **kw) * 1.001)
    assert not fused(target)


def test_hooks_of_others_are_not_passed_over():
    model = copy.deepcopy(make_model("llama", torch.float32))
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    target = load_target(model)
    assert fused(target) == set(model.model.layers[1:])


@torch.no_grad()
def test_a_layer_leaves_its_input_as_it_was():
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)))
    verifier = TreeTarget(target)
    _, states = verified(verifier, target, 3)
    assert torch.equal(states[..., : target.hidden_size], target.input_embedding(TOKENS[:, :3]))


def hooks(layers, seen):
    """Ways to look at what the first of these layers gives; a hook may come when the verifier is there already."""
    yield lambda: layers[0].register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    yield lambda: layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    yield lambda: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(out.clone()) if module is layers[0] else None
    )


@torch.no_grad()
@pytest.mark.parametrize("which", range(3))
def test_who_looks_at_a_layer_sees_all_of_its_result(which, monkeypatch):
    """Else the last product's sum is left to the next layer."""
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)))
    verifier, seen = TreeTarget(target), []
    first = target.model.model.layers[0]
    _, states = verified(verifier, target, 3)
    assert dict(verifier.forwards.forwards)[first].next is not None
    hook = list(hooks(target.model.model.layers, seen))[which]()
    try:
        _, again = verified(verifier, target, 3)
        after_first = states[..., target.hidden_size : 2 * target.hidden_size]
        torch.testing.assert_close(seen[-1].view(after_first.shape), after_first)
        torch.testing.assert_close(again, states)
        monkeypatch.setattr(layer_compile, "defer_sums", lambda layers: setattr(layers[0][1], "next", layers[1][1]))
        verified(verifier, target, 3)
        assert not torch.allclose(seen[-1].view(after_first.shape), after_first), "the twin: it looks too early"
    finally:
        hook.remove()


@torch.no_grad()
def test_sums_are_deferred_between_fused_neighbours():
    model = copy.deepcopy(make_model("llama", torch.float32, num_hidden_layers=5))
    model.model.layers[2].mlp.register_forward_hook(lambda *args: None)
    target = load_target(model)
    verifier = TreeTarget(target)
    for got, want in zip(verified(verifier, target, 4), own(target, 4), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    passes = dict(verifier.forwards.forwards)
    assert set(passes) == set(model.model.layers) - {model.model.layers[2]}
    assert [passes[layer].next is not None for layer in passes] == [True, False, True, False]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "offset"), [("llama", 0.0), ("gemma3", 1.0)])
def test_a_layer_norm_is_not_taken_for_an_rms_norm(kind, offset):
    norm = copy.deepcopy(make_model(kind, torch.float32)).model.norm
    norm.weight.uniform_(0.5, 1.5)
    assert layer_parts.norm_of(norm).offset == offset
    with pytest.raises(layer_parts.CannotFuse, match="not an RMS norm"):
        layer_parts.norm_of(torch.nn.LayerNorm(len(norm.weight)))
