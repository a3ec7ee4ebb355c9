"""A model is handed back as it came: forwards, parameters' storage, attention, hooks, training mode."""

import copy

import pytest
import torch

from redrafter import custom_generate
from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece
from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu import ops
from redrafter.targets import Target, load_target, pretrained
from redrafter.targets.cpu.passes import install_cpu_forwards
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.selfcheck import checked_tree_target
from tests.helpers.zoo import make_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def fresh(kind: str = "llama"):
    return copy.deepcopy(make_model(kind, torch.float32))


def snapshot(model):
    """All that using a model may change, besides its values."""
    return {
        "forwards": [vars(m).get("forward") for m in model.modules()],
        "modules": [id(m) for m in model.modules()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "hooks": [list(m._forward_hooks.values()) for m in model.modules()],
        "attention": model.config._attn_implementation,
        "training": [m.training for m in model.modules()],
    }


def shares_storage(model) -> bool:
    """Whether two parameters lie in one storage, or one in a larger one."""
    parameters = list(model.parameters())
    storages = [p.untyped_storage() for p in parameters]
    whole = all(s.nbytes() == p.numel() * p.element_size() for s, p in zip(storages, parameters, strict=True))
    return not whole or len({s.data_ptr() for s in storages}) < len(storages)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])  # qwen2: with biases; mixtral: nothing is fused
def test_the_gpu_path_hands_a_users_model_back(kind):
    model = fresh(kind)
    model(TOKENS, output_hidden_states=True)  # transformers adds its own hooks at the first such call
    model.train()
    model.model.norm.eval()  # a user may freeze a part
    before, weights = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    shared = shares_storage(model)
    model.eval()
    want = model(TOKENS).logits
    model.train()
    model.model.norm.eval()

    target = load_target(model)
    checked_tree_target(target)
    tree = TreeTarget(target)
    cache = KVCache(slots=40)
    target.prefill(TOKENS, [7], cache, ())
    tree.read([Piece(0, 7, TOKENS[0, :3].tolist())], cache, ())
    assert shares_storage(model), "nothing was stacked: the test says nothing"
    assert snapshot(model) != before, "the model is in eval mode"
    target.release()
    target.release()

    assert snapshot(model) == before
    assert shares_storage(model) == shared
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[k], weights[k]) for k in weights)
    model.eval()
    assert torch.equal(model(TOKENS).logits, want)


def test_a_released_model_trains():
    model = fresh()
    target = load_target(model)
    TreeTarget(target)
    target.release()
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    stack = model.model.layers[0].self_attn
    before = stack.k_proj.weight.clone()
    torch.optim.SGD([stack.q_proj.weight], lr=1.0).step()
    assert torch.equal(stack.k_proj.weight, before), "a neighbour's parameter moved"
    twin = fresh()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.model.layers[0].self_attn.q_proj.weight, stack.q_proj.weight)


def test_parameters_that_a_user_moved_are_left_alone():
    model = fresh()
    target = load_target(model)
    TreeTarget(target)
    model.double()
    places = [p.data_ptr() for p in model.parameters()]
    target.release()
    assert [p.data_ptr() for p in model.parameters()] == places


@torch.no_grad()
@pytest.mark.skipif(not ops.available(), reason="no C++ compiler here")
def test_the_cpu_path_is_removed():
    model = fresh()
    before, want = snapshot(model), model(TOKENS).logits
    target = Target(model)
    install_cpu_forwards(target)
    assert snapshot(model) != before
    model.model.norm.forward = own = lambda x: x  # a change by the user, made later, stays
    target.release()
    assert vars(model.model.norm)["forward"] is own
    del model.model.norm.forward
    assert snapshot(model) == before
    assert torch.equal(model(TOKENS).logits, want)


def test_a_refused_model_is_handed_back(monkeypatch):
    def refuse(target):
        assert not target.model.training
        raise UnsupportedTarget("no")

    model = fresh().train()
    monkeypatch.setattr(pretrained, "check", refuse)
    with pytest.raises(UnsupportedTarget):
        load_target(model)
    assert model.training


@pytest.mark.parametrize("fails", [False, True])
def test_custom_generate_releases_the_model(fails, monkeypatch):
    model = fresh().train()
    model.model.norm.eval()
    before = snapshot(model)
    verify = Target.verify

    def on_a_gpu(self, *args, **kwargs):
        TreeTarget(self)
        assert shares_storage(model)
        if fails:
            raise ZeroDivisionError
        return verify(self, *args, **kwargs)

    monkeypatch.setattr(pretrained, "check", lambda target: None)
    monkeypatch.setattr(Target, "verify", on_a_gpu)
    options = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": False, "drafter": "ngram"}
    if fails:
        with pytest.raises(ZeroDivisionError):
            model.generate(TOKENS, custom_generate=custom_generate, **options)
    else:
        model.generate(TOKENS, custom_generate=custom_generate, **options)
    assert snapshot(model) == before
    assert not shares_storage(model)
