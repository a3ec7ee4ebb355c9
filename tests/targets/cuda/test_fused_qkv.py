"""Products of one input as one: the model stays as it was, and gives what it gave."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from redrafter.core.cache import KVCache
from redrafter.errors import UnsupportedTarget
from redrafter.targets import load_target
from redrafter.targets.cuda.fused_qkv import LinearSlice, replaced, stack_linears
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.selfcheck import checked_tree_target
from tests.helpers.zoo import make_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


class Products(TorchFunctionMode):
    """Counts calls of F.linear."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # without biases, with
def test_one_product_where_there_were_three(kind):
    model = copy.deepcopy(make_model(kind, torch.float32))
    layers = model.config.num_hidden_layers
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with Products() as own:
        want = model(TOKENS).logits
    every = stack_linears(model)
    with replaced(every), Products() as stacked:
        got = model(TOKENS).logits
    assert own.count == 7 * layers + 1
    assert stacked.count == 4 * layers + 1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert all(r.slice.stack.output is None for r in every), "an input is kept alive"


def test_weights_move_once():
    model = copy.deepcopy(make_model("llama", torch.float32))
    first = [r.slice.stack.weight.data_ptr() for r in stack_linears(model)]
    places = [p.data_ptr() for p in model.parameters()]
    assert [r.slice.stack.weight.data_ptr() for r in stack_linears(model)] == first
    assert [p.data_ptr() for p in model.parameters()] == places
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    key = model.model.layers[0].self_attn.k_proj.weight
    stack = stack_linears(model)[0].slice.stack.weight
    assert torch.equal(stack[len(model.model.layers[0].self_attn.q_proj.weight) :][: len(key)], key), "a view, no copy"


def test_what_others_changed_stays_theirs():
    model = copy.deepcopy(make_model("llama", torch.float32))
    count = len(stack_linears(model))
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *a: None)
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert len(stack_linears(model)) == count - 5


@torch.no_grad()
def test_a_wrong_part_is_found(monkeypatch):
    # mixtral: its layers are not fused
    target = load_target(make_model("mixtral", torch.float32))
    checked_tree_target(target)

    def shifted(self, x):
        return self.stack(x).roll(1, -1)[..., self.start : self.stop]

    monkeypatch.setattr(LinearSlice, "forward", shifted)
    with pytest.raises(UnsupportedTarget, match="other logits"):
        checked_tree_target(target)


def test_a_failure_inside_leaves_the_model_as_it_was():
    target = load_target(make_model("llama", torch.float32))
    tree = TreeTarget(target)
    own = target.model.model.layers[0].self_attn.q_proj

    def fail():
        with tree.using(KVCache(slots=4)):
            assert target.model.model.layers[0].self_attn.q_proj is not own
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert target.model.model.layers[0].self_attn.q_proj is own
