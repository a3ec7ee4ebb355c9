"""Layers compiled by themselves: one for all, and the model as it was."""

import copy
import functools

import pytest
import torch
from torch._dynamo.utils import counters

from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece, of_pieces
from redrafter.targets import load_target
from redrafter.targets.cuda import layer_compile
from redrafter.targets.cuda.tree_target import TreeTarget
from tests.helpers.zoo import make_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture
def traced(monkeypatch):
    """What is compiled is traced, and no code made of it."""
    eager = functools.partial(torch.compile, backend="eager", dynamic=True, fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda f, **kw: eager(f))
    torch._dynamo.reset()
    counters.clear()


def verified(one, target, n):
    cache = KVCache(slots=40)
    target.prefill(TOKENS, [7], cache, ())
    flat = of_pieces([Piece(0, 7, TOKENS[0, :n].tolist())], one.longest)
    return [x[None] for x in one.run(flat, cache, (1, -1))]


@torch.no_grad()
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])  # two kinds of layers
def test_one_layer_is_compiled_for_all(kind, traced, monkeypatch):
    monkeypatch.setattr(layer_compile, "fuse_layers", lambda *args: {})
    target = load_target(copy.deepcopy(make_model(kind, torch.float32)))
    want, one = TreeTarget(target), TreeTarget(target, compiles=True)
    for n in (6, 3, 7):  # not the mask's five words: equal sizes would be taken for one
        for a, b in zip(verified(one, target, n), verified(want, target, n), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        beside = 4 if kind == "llama" else 6
        assert 1 < counters["stats"]["unique_graphs"] <= beside + (1 if kind == "llama" else 2), "a layer compiled anew"
    assert target.layer_count > 1
    assert {type(m).__name__ for m, _ in one.forwards.forwards} > {type(target.model.model.layers[0]).__name__}


@torch.no_grad()
def test_the_model_is_as_it_was(traced):
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)))
    want = target.states(TOKENS, (0, 1, -1))  # transformers hangs its hooks now
    before = {m: dict(m._forward_hooks) for m in target.model.modules()}
    one = TreeTarget(target, compiles=True)
    verified(one, target, 5)
    assert {m: dict(m._forward_hooks) for m in target.model.modules()} == before
    assert not any("forward" in vars(m) for m in target.model.modules())
    assert torch.equal(target.states(TOKENS, (0, 1, -1)), want)


def test_others_forwards_stay_theirs(traced):
    model = copy.deepcopy(make_model("llama", torch.float32))
    layer = model.model.layers[0]
    layer.forward = layer.forward
    assert layer not in [m for m, _ in TreeTarget(load_target(model), compiles=True).forwards.forwards]
    assert layer.forward is vars(layer)["forward"]
