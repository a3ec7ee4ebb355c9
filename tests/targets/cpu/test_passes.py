"""The CPU's own path of a model: the same logits, only where modules are what they look like."""

import copy

import pytest
import torch
from torch import nn

import redrafter
from redrafter import Shape
from redrafter.core.cache import KVCache
from redrafter.core.tree import pack_beam
from redrafter.drafters import RecurrentDrafter
from redrafter.kernels.cpu import library, naive, ops
from redrafter.targets import Target, load_target
from redrafter.targets.cpu.modules import candidates
from redrafter.targets.cpu.passes import install_cpu_forwards
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, VOCAB, make_model, recurrent_drafter

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ compiler here")


def replaced(model) -> set[str]:
    return {type(m).__name__ for m in model.modules() if "forward" in vars(m)}


def lean_twin(kind: str) -> tuple[Target, Target]:
    """A model as it is, and a lean copy."""
    wide = {} if kind.startswith("gpt") else {"head_dim": 16}  # attention in C++ takes multiples of 16
    own = Target(make_model(kind, torch.float32, **wide))
    other = Target(copy.deepcopy(own.model))
    install_cpu_forwards(other)
    return own, other


@torch.no_grad()
def tree_logits(target: Target) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (2, 30))
    tree, _ = pack_beam(torch.randint(VOCAB, (2, 2, 3)), tokens[:, 0])
    cache = KVCache(slots=30 + tree.nodes + 1)
    target.prefill(tokens, [30, 21], cache, ())
    return target.verify(tree, torch.tensor([30, 21]), cache, ())[0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_lean_models_equal_their_originals(kind):
    own, other = lean_twin(kind)
    assert replaced(other.model)
    assert replaced(own.model) == set()
    torch.manual_seed(1)
    wanted = tree_logits(own)
    torch.manual_seed(1)
    made = tree_logits(other)
    assert float((made - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", {"Linear", "LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer"}),
        ("qwen3", {"Linear", "Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention", "Qwen3DecoderLayer"}),
        ("gemma3", {"Linear", "Gemma3RMSNorm", "Gemma3Attention"}),  # its gate is no silu
        ("olmo2", {"Linear", "Olmo2RMSNorm", "Olmo2MLP"}),  # it norms all heads together
        ("gpt-neox", {"Linear"}),
    ],
)
def test_what_is_replaced(kind, names):
    _, other = lean_twin(kind)
    assert replaced(other.model) == names


def test_attention_with_other_head_sizes_keeps_its_own_forward():
    model = copy.deepcopy(make_model("llama", torch.float32))
    assert model.model.layers[0].self_attn.head_dim == 8
    install_cpu_forwards(Target(model))
    assert replaced(model) == {"Linear", "LlamaRMSNorm", "LlamaMLP"}


def test_attention_with_a_gate_among_its_queries_keeps_its_own_forward():
    """As in Qwen3.5: the queries' product is twice as wide as what the output reads."""
    attention = copy.deepcopy(make_model("llama", torch.float32, head_dim=16)).model.layers[0].self_attn
    assert [forward for forward, _ in candidates(attention)] != []
    size = attention.q_proj
    attention.q_proj = nn.Linear(size.in_features, 2 * size.out_features, bias=False)
    assert [forward for forward, _ in candidates(attention)] == []


@torch.no_grad()
def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    x, fits, wide = torch.randn(2, 32), torch.randn(16, 32), torch.randn(16, 64)
    for call in (
        lambda: ops.linear(x, wide),
        lambda: ops.linear3(x, [(fits, None), (fits, None), (wide, None)]),
        lambda: ops.gated(x, wide, wide, wide.T.contiguous()),
        lambda: ops.gated(x, fits, fits, fits),
    ):
        with pytest.raises(ValueError, match="weight"):
            call()


def test_texts_of_a_lean_model_are_the_originals():
    own, other = lean_twin("llama")
    plain = redrafter.Engine(own, recurrent_drafter(own)).plain().generate(PROMPTS, max_new_tokens=20)
    for drafter in (recurrent_drafter(other), redrafter.drafters.NgramDrafter()):
        done = redrafter.Engine(other, drafter, shape=Shape(width=3, length=3)).generate(PROMPTS, max_new_tokens=20)
        assert [c.tokens for c in done] == [c.tokens for c in plain]


class Odd(nn.Module):
    """Looks like a norm and is none."""

    def __init__(self, like):
        super().__init__()
        self.weight, self.eps = like.weight, 1e-6

    def forward(self, x):
        return x * self.weight


def test_what_only_looks_like_a_norm_keeps_its_own_forward():
    model = copy.deepcopy(make_model("llama", torch.float32))
    model.model.norm = Odd(model.model.norm)
    install_cpu_forwards(Target(model))
    assert "Odd" not in replaced(model)
    assert "LlamaRMSNorm" in replaced(model)


def test_twin_a_wrong_function_is_seen(monkeypatch):
    """One that is wrong from the start replaces nothing; one that is wrong only in a pass is taken back as a whole."""
    monkeypatch.setattr(ops, "gated", lambda *given: 1.001 * naive.gated(*given))
    _, other = lean_twin("llama")
    assert "LlamaMLP" not in replaced(other.model)
    assert "Linear" in replaced(other.model)
    monkeypatch.setattr(ops, "linear", lambda x, *given: naive.linear(x, *given) * (1.001 if x.shape[1] == 7 else 1.0))
    _, other = lean_twin("gpt-neox")
    assert replaced(other.model) == set()


def test_a_copy_has_weights_of_its_own():
    _, other = lean_twin("llama")
    twin = copy.deepcopy(other.model)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
        x = torch.tensor([[1, 2, 3]])
        assert float(tree_logits(Target(twin)).abs().max()) > 0
        assert float(tree_logits(other).abs().max()) == 0
        assert float(twin(x).logits.abs().max()) > 0
        assert float(other.model(x).logits.abs().max()) == 0


def test_gradients_and_other_dtypes_go_the_models_own_way():
    own, other = lean_twin("llama")
    x = torch.tensor([[1, 2, 3]])
    other.model(x).logits.sum().backward()
    assert other.model.lm_head.weight.grad is not None
    with torch.no_grad():
        wanted = copy.deepcopy(own.model).bfloat16()(x).logits
        assert torch.equal(other.model.bfloat16()(x).logits, wanted)


def test_only_models_that_we_load_ourselves(tmp_path):
    model = make_model("llama", torch.float32)
    load_target(model)
    assert replaced(model) == set()
    model.save_pretrained(tmp_path)
    assert replaced(load_target(tmp_path, device="cpu").model)
    assert replaced(load_target(tmp_path, device="cpu", dtype="fp64").model) == set()


def test_without_a_compiler_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    library.library.cache_clear()
    try:
        _, other = lean_twin("llama")
        assert replaced(other.model) == set()
        assert float(tree_logits(other).abs().max()) > 0
    finally:
        library.library.cache_clear()


@pytest.mark.parametrize(
    "changes", [{}, {"memory_heads": 2, "memory_size": 8, "cell": "gated", "normed": True}, {"draft_vocab_size": 20}]
)
def test_a_lean_drafter_guesses_as_its_rounded_weights_do(tmp_path, changes):
    target = Target(make_model("llama", torch.float32))
    drafter = recurrent_drafter(target, **changes)
    drafter.save(tmp_path, target, storage="int8")
    loaded = RecurrentDrafter.load(tmp_path, target)
    assert replaced(loaded.net) == {"Linear"}
    bare = RecurrentDrafter(copy.deepcopy(loaded.net), target)
    for module in bare.net.modules():
        vars(module).pop("forward", None)
    for name in ("columns", "_unit"):
        vars(bare.net).pop(name, None)
    texts = []
    for one in (loaded, bare):
        engine = redrafter.Engine(target, one, shape=Shape(width=3, length=3))
        done = engine.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=3)
        texts.append([c.tokens for c in done])
        assert sum(c.stats.accepted for c in done) > 0
    assert texts[0] == texts[1]
