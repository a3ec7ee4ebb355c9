"""A widened pair is the small pair: the same logits, the same guesses, at a larger size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.widen import SHAPES, LlamaShape, widen
from benchmarks.widen.drafter import (
    BUDGETS,
    fitting,
    parameters_per_draft_step,
    read_per_draft_step,
    widen_recurrent,
)
from benchmarks.widen.target import empty_model, wide_config
from redrafter import Engine, Shape
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter, RecurrentDrafter, RecurrentNet, checkpoint, shipped
from redrafter.errors import ConfigError, DrafterMismatch, UnsupportedTarget
from redrafter.targets import Target, load_target
from redrafter.texts import Texts
from redrafter.tuning.simulate import SimulatedSteps, simulate
from tests.helpers.toys import make_texts
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter

# The small model: hidden 32, 2 layers, 4 heads of 8 on 2 kv heads, MLP 48.
WIDE = {
    "keys repeated": LlamaShape(hidden=96, layers=4, heads=6, kv_heads=6, mlp=80),
    "groups with a gap": LlamaShape(hidden=96, layers=3, heads=6, kv_heads=2, mlp=48),
    "only wider": LlamaShape(hidden=40, layers=2, heads=4, kv_heads=2, mlp=48),
}
TOKENS = torch.randint(VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))
SHAPE = Shape(width=4, length=4, nodes=9)
FULL = {
    "exit_size": 24,
    "state_size": 20,
    "cell": "gated",
    "first_state": "context",
    "head": "tied",
    "normed": True,
    "memory_heads": 2,
    "memory_size": 8,
    "draft_vocab_size": 30,
    "layers": (1, -2, 2, -1),
    "context_size": 128,
}
"""All that the shipped drafter has."""


@torch.no_grad()
def gap(small: Any, wide: Any) -> float:
    """Largest difference of logits, as a share of their spread."""
    logits = small(TOKENS).logits
    return float((wide(TOKENS).logits - logits).abs().max() / logits.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_the_logits_are_those_of_the_small_model(shape: LlamaShape, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    wide = widen(model, shape)
    assert gap(model, wide) < 3e-5, "fp32 either way: so are transformers' norms and rotary tables"
    assert not torch.equal(wide.lm_head.weight, wide.model.embed_tokens.weight)
    assert wide.lm_head.weight.dtype == dtype
    assert gap(model, load_target(wide).model) < 3e-5, "it passes the self-check"


@torch.no_grad()
def test_hidden_states_are_the_small_ones_and_zeros() -> None:
    model = make_model(dtype=torch.float32)
    wide = widen(model, WIDE["keys repeated"])
    small, large = (m(TOKENS, output_hidden_states=True).hidden_states for m in (model, wide))
    for layer in (0, 1, -1):
        assert torch.allclose(large[layer][..., :32], small[layer], atol=1e-4)
        assert not large[layer][..., 32:].any(), "exactly zero"


def spoil_norms(wide: Any) -> None:
    wide.model.norm.weight *= 3**0.5


def spoil_eps(wide: Any) -> None:
    wide.model.layers[0].input_layernorm.variance_epsilon *= 3e4  # of 1e-6; hidden states are about 0.3


def spoil_rotary(wide: Any) -> None:
    wide.config.rope_parameters["rope_theta"] = make_model().config.rope_parameters["rope_theta"]
    wide.model.rotary_emb = type(wide.model.rotary_emb)(config=wide.config)


def spoil_queries(wide: Any) -> None:
    wide.model.layers[0].self_attn.q_proj.weight *= 0.5**0.5


def spoil_added_layer(wide: Any) -> None:
    wide.model.layers[3].mlp.up_proj.weight.normal_()


def spoil_padded_values(wide: Any) -> None:
    wide.model.layers[0].self_attn.v_proj.weight[-1].normal_()


SPOILS = [spoil_norms, spoil_eps, spoil_rotary, spoil_queries, spoil_added_layer, spoil_padded_values]


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_logits_twin(spoil: Callable[[Any], None]) -> None:
    """Each of the widening's parts is needed: without it, logits differ."""
    model = make_model(dtype=torch.float32)
    wide = widen(model, WIDE["keys repeated"])
    with torch.no_grad():
        spoil(wide)
    assert gap(model, wide) > 1e-3


def test_weights_that_do_not_matter_are_random() -> None:
    model = make_model(dtype=torch.float32)
    shape = WIDE["keys repeated"]
    one, same, other = (widen(model, shape, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    # Zeros are left where real inputs meet outputs that must be zero; o and down of an added layer have none.
    for layer in one.model.layers:
        assert (layer.mlp.down_proj.weight == 0).float().mean() < 0.45
    added = one.model.layers[-1]
    for matrix in (added.self_attn.o_proj, added.mlp.down_proj, added.self_attn.q_proj, added.mlp.gate_proj):
        assert (matrix.weight != 0).all()
    assert (added.mlp.up_proj.weight[:, 32:] != 0).all()


class Recorder:
    """A drafter, and all trees it made."""

    def __init__(self, drafter: RecurrentDrafter) -> None:
        self.drafter, self.trees = drafter, list[Tree]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, state: Any, last: torch.Tensor, search: Search) -> Tree:
        self.trees.append(self.drafter.draft(state, last, search))
        return self.trees[-1]


def walked(target: Target, drafter: RecurrentDrafter, texts: Texts) -> tuple[SimulatedSteps, list[Tree]]:
    recorder = Recorder(drafter)
    return simulate(target, recorder, texts, SHAPE), recorder.trees


def same_guesses(small: tuple[Target, RecurrentDrafter], wide: tuple[Target, RecurrentDrafter], texts: Texts) -> bool:
    (one, trees), (other, wide_trees) = walked(*small, texts), walked(*wide, texts)
    return one == other and all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.parents, b.parents)
        for a, b in zip(trees, wide_trees, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, 300_000),
        ({"exit_size": 64}, 300_000),  # state + context: no input projection
        ({"cell": "none", "head": "tied", "draft_vocab_size": 30}, 300_000),
        ({"exit_size": 48, "first_state": "zero", "normed": True, "state_size": 16}, 300_000),
        ({"exit_size": 64, "first_state": "zero", "normed": True, "memory_heads": 2, "memory_size": 8}, 300_000),
        (FULL, 300_000),
        (FULL, 11_500),  # too little for a tied head
    ],
    ids=["papers", "unprojected", "no cell", "normed", "normed memory", "shipped", "shipped, own head"],
)
def test_the_guesses_are_those_of_the_small_drafter(changes: dict[str, Any], budget: int, dtype: torch.dtype) -> None:
    target = Target(make_model(dtype=dtype))
    wide = Target(widen(target.model, WIDE["keys repeated"]))
    drafter = recurrent_drafter(target, **changes)
    large = widen_recurrent(drafter, wide, budget)
    assert large.net.config.exit_size > drafter.net.config.exit_size or budget == 11_500
    assert large.net.config.head == ("own" if budget == 11_500 else drafter.net.config.head)
    assert parameters_per_draft_step(large) <= budget
    for temperature in (0.0, 1.0):
        texts = make_texts(target, count=8, temperature=temperature)
        assert same_guesses((target, drafter), (wide, large), texts)


@pytest.mark.parametrize("part", ["blocks.0", "cell_w", "head", "memory.query", "input_proj"])
def test_the_guesses_twin(part: str) -> None:
    target = Target(make_model(dtype=torch.float64))
    wide = Target(widen(target.model, WIDE["keys repeated"]))
    drafter = recurrent_drafter(target, **FULL)
    large = widen_recurrent(drafter, wide, 150_000)
    weight = large.net.get_submodule(part).weight
    with torch.no_grad():
        weight[0] += weight.abs().mean() * 3
    assert not same_guesses((target, drafter), (wide, large), make_texts(target, count=8, temperature=1.0))


def test_what_a_draft_step_reads() -> None:
    target = Target(make_model())
    drafter = recurrent_drafter(target, **FULL)
    state, exit_size, hidden, memory = 20, 24, 32, 16
    cell = 2 * state * (state + hidden + 1)
    blocks = 2 * exit_size * (exit_size + 1)
    head = hidden * exit_size + 30 * hidden
    assert parameters_per_draft_step(drafter) == cell + state * memory + exit_size * (state + memory) + blocks + head


def test_engines_write_the_same_text() -> None:
    target = Target(make_model(dtype=torch.float64))
    wide = load_target(widen(target.model, WIDE["groups with a gap"]))
    large = widen_recurrent(recurrent_drafter(target, **FULL), wide, 150_000)
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        plain = Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=16, **options)
        done = Engine(wide, large, shape=SHAPE).generate(PROMPTS, max_new_tokens=16, **options)
        assert [c.tokens for c in done] == [c.tokens for c in plain]


@pytest.fixture(scope="module")
def smollm() -> Target:
    return load_target(dtype="fp32", device="cpu")


def unrounded(target: Target) -> RecurrentDrafter:
    """The shipped drafter in the target's own precision, whatever loading makes of it for speed."""
    folder = shipped.find(target)
    assert folder is not None
    return RecurrentDrafter(checkpoint.read(folder)[0], target)


@pytest.mark.slow
def test_the_real_pair(smollm: Target) -> None:
    """SmolLM2 and its drafter, with heads of 128, a layer more and twice the hidden size."""
    target = smollm
    wide = Target(
        widen(target.model, LlamaShape(hidden=1152, layers=31, heads=9, kv_heads=3, mlp=1664)), target.tokenizer
    )
    prompt = target.tokenizer.encode("The lighthouse keeper opened the door and saw that the sea was")
    (done,) = Engine(target, NoDrafter()).generate([prompt], max_new_tokens=24)
    tokens = torch.tensor([[*prompt, *done.tokens]])
    with torch.no_grad():
        small, large = (t.model(tokens).logits for t in (target, wide))
    assert float((large - small).abs().max() / small.std()) < 1e-3
    drafter = unrounded(target)
    twin = widen_recurrent(drafter, wide, 61_000_000)
    assert twin.net.config.exit_size == 1408
    texts = Texts.of(tokens.tolist(), [len(prompt)], [0.0], [0])
    assert same_guesses((target, drafter), (wide, twin), texts)
    assert walked(wide, twin, texts)[0].tokens_per_step > 1.5, "it guesses well, that is"


def test_the_named_shapes(smollm: Target) -> None:
    """Billions of parameters of each target, millions a draft step reads; only skeletons, no weights."""
    drafter = unrounded(smollm)
    found = {}
    for name, shape in SHAPES.items():
        config = wide_config(smollm.config, shape, name)
        target = Target(empty_model(type(smollm.model), config, torch.bfloat16, torch.device("meta")))
        assert target.dtype == torch.bfloat16
        assert config.head_dim == 128
        assert config.rope_parameters["rope_theta"] == 1e10
        assert config.max_position_embeddings == 8192
        sizes = [sum(p.numel() for p in target.model.parameters()) / 1e9]
        for budget in BUDGETS.values():
            with torch.device("meta"):
                net = RecurrentNet(fitting(drafter.net.config, target, budget))
            sizes.append(read_per_draft_step(net) / 1e6)
            assert (net.config.head == "own") == (budget <= 120_000_000), "a tied head fits into the largest only"
        found[name] = tuple(round(size, 1) for size in sizes)
    assert found == {
        "vicuna-7b": (6.9, 73.0, 97.7, 115.4, 419.6),
        "vicuna-13b": (13.2, 75.9, 92.7, 119.5, 424.0),
        "vicuna-33b": (32.8, 71.8, 97.8, 116.3, 421.6),
        "llama-3-8b": (7.4, 73.0, 97.7, 115.4, 419.6),
    }


def test_refusals() -> None:
    model = make_model()
    with pytest.raises(UnsupportedTarget, match="only a LlamaForCausalLM can be widened, not a Qwen2ForCausalLM"):
        widen(make_model("qwen2"), "vicuna-7b")
    for changes, message in (
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"attention_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear rotary scaling"),
    ):
        with pytest.raises(UnsupportedTarget, match=message):
            widen(make_model(**changes), WIDE["keys repeated"])
    for shape, message in (
        (LlamaShape(hidden=16, layers=2, heads=2, kv_heads=2, mlp=48), "its hidden size is 32, the shape's 16"),
        (LlamaShape(hidden=64, layers=1, heads=4, kv_heads=2, mlp=48), "its number of layers is 2, the shape's 1"),
        (LlamaShape(hidden=64, layers=2, heads=16, kv_heads=4, mlp=48), "its head size is 8, the shape's 4"),
        (LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=47), "its MLP size is 48, the shape's 47"),
        (LlamaShape(hidden=64, layers=2, heads=2, kv_heads=2, mlp=48), "heads need 4 kv heads, the shape has 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            widen(model, shape)
    with pytest.raises(ConfigError, match="unknown shape 'vicuna-8b'; use one of vicuna-7b"):
        widen(model, "vicuna-8b")
    with pytest.raises(ConfigError, match="3 heads of even size do not make 32"):
        LlamaShape(hidden=32, layers=1, heads=3, kv_heads=1, mlp=1)


def test_refusals_of_the_drafter() -> None:
    target = Target(make_model())
    wide = Target(widen(target.model, WIDE["keys repeated"]))
    drafter = recurrent_drafter(target)
    with pytest.raises(DrafterMismatch, match="llama is no widened target"):
        widen_recurrent(drafter, target)
    with pytest.raises(ConfigError, match="unknown budget '7B'"):
        widen_recurrent(drafter, wide, "7B")
    with pytest.raises(ConfigError, match=r"reads at least .* the budget is 1,000"):
        widen_recurrent(drafter, wide, 1000)
    with pytest.raises(DrafterMismatch, match="states are normalised embeddings"):
        widen_recurrent(recurrent_drafter(target, normed=True), wide)
    again = Target(widen(wide.model, LlamaShape(hidden=120, layers=4, heads=6, kv_heads=6, mlp=80)))
    with pytest.raises(DrafterMismatch, match="from a hidden size of 96, the drafter reads one of 32"):
        widen_recurrent(drafter, again)
