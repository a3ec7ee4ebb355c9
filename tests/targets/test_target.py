"""Which models are taken, which are refused, and how they say why."""

import psutil
import pytest
import torch
import transformers as tf
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import redrafter
from redrafter import Engine, Shape
from redrafter.core.cache import KVCache
from redrafter.core.tree import pack_beam
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.targets import Target, load_target, pretrained
from redrafter.targets import target as target_module
from tests.helpers.zoo import COMMON, PROMPTS, VOCAB, make_model, recurrent_drafter


def build(config):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def longrope():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    sizes = COMMON | {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    return tf.Phi3Config(**sizes, rope_parameters=rope)


def llama4(tuning: bool):
    """Llama 4's text model without chunked layers; every second layer has no rotary embedding."""
    return tf.Llama4TextConfig(
        **COMMON | {"num_hidden_layers": 4, "max_position_embeddings": 256},
        head_dim=8,
        intermediate_size_mlp=48,
        layer_types=["full_attention"] * 4,
        no_rope_layers=[1, 0, 1, 0],
        moe_layers=[],
        attn_temperature_tuning=tuning,
        floor_scale=32,
        attn_scale=0.5,
    )


REFUSED = {
    "a state in the modules": (
        lambda: tf.RecurrentGemmaConfig(**COMMON | {"num_hidden_layers": 3}, lru_width=32, attention_window_size=16),
        "keeps a recurrent state",
    ),
    "recurrent": (
        lambda: tf.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, context_length=64),
        "keeps a recurrent state",
    ),
    "window counted in slots": (
        lambda: tf.GPTNeoConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=20,
            max_position_embeddings=96,
        ),
        "gives a tree node other logits",
    ),
    "no head": (lambda: tf.LlamaConfig(**COMMON), "is no causal LM"),
    "long rope": (longrope, "rotary scaling looks at the longest position"),
    "relative bias from a 2D mask": (
        lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        "does not take a 4D attention mask",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    model = build(make())
    if name == "no head":
        model = model.model
    with pytest.raises(UnsupportedTarget, match=reason):
        load_target(model)


def test_long_rope_that_is_not_switched_on_by_length_is_taken():
    """The twin of the refusal: the same model family, with scaling that looks at no other row."""
    config = longrope()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    load_target(build(config))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_positions_from_the_cache_are_found_in_every_dtype(dtype, monkeypatch):
    monkeypatch.setattr("redrafter.targets.target.scaling_attentions", lambda model: [])
    with pytest.raises(UnsupportedTarget, match="positions from the length of the KV cache"):
        load_target(build(llama4(tuning=True)).to(dtype))


def test_a_model_that_drops_the_mask_falls_back_to_eager(tmp_path, caplog):
    config = tf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=96,
        rotary_dim=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = build(config)
    model.save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="redrafter"):
        engine = redrafter.load(str(tmp_path), drafter="ngram", dtype="fp64", device="cpu")
    assert engine.target.config._attn_implementation == "eager"
    plain = engine.plain().generate(PROMPTS, max_new_tokens=12)
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=12)] == [c.tokens for c in plain]


def test_attention_that_ignores_masks_is_refused_for_a_users_own_model():
    def deaf(module, query, key, value, attention_mask, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2), None

    tf.AttentionInterface.register("deaf", deaf)
    model = make_model("llama", vocab_size=VOCAB)
    model.set_attn_implementation("deaf")
    with pytest.raises(UnsupportedTarget, match="ignores the attention mask"):
        load_target(model)
    assert model.config._attn_implementation == "deaf", "a user's model is left as it was"


def test_device_map_as_it_comes(tmp_path):
    """Split between CPU and disk by accelerate: the cache follows each layer by itself."""
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    engine = redrafter.load(
        str(tmp_path), dtype="fp32", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    whole = redrafter.load(str(tmp_path), dtype="fp32", drafter=None, device="cpu")
    got = [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=12)]
    assert got == [c.tokens for c in whole.generate(PROMPTS, max_new_tokens=12)]


class Int8Linear(torch.nn.Module):
    """Weights as int8 with a scale per row, multiplied out when used."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


@register_quantization_config("int8_rows")
class Int8Config(QuantizationConfigMixin):
    def __init__(self, **kwargs) -> None:
        self.quant_method = "int8_rows"


@register_quantizer("int8_rows")
class Int8Quantizer(HfQuantizer):
    is_serializable = is_trainable = False
    requires_calibration = False

    def _process_model_after_weight_loading(self, model, **kwargs):
        for layer in model.model.layers:
            for part in (layer.mlp, layer.self_attn):
                for name, child in list(part.named_children()):
                    if isinstance(child, torch.nn.Linear):
                        setattr(part, name, Int8Linear(child))
        return model


def test_quantised_as_it_comes(tmp_path):
    """Through transformers' own door for quantisers: from_pretrained(quantization_config=...)."""
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    engine = redrafter.load(str(tmp_path), dtype="fp32", device="cpu", quantization_config=Int8Config())
    assert engine.target.model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8, "really quantised"
    plain = [c.tokens for c in engine.plain().generate(PROMPTS, max_new_tokens=20)]
    drafter = recurrent_drafter(engine.target)
    for speculative in (engine, Engine(engine.target, drafter, shape=Shape(width=3, length=3))):
        assert [c.tokens for c in speculative.generate(PROMPTS, max_new_tokens=20)] == plain


def test_hidden_states_are_those_of_the_path_alone():
    model = make_model()
    target = Target(model)
    layers = (0, 1, -1)
    prompt = torch.tensor([PROMPTS[0]])
    tree, _ = pack_beam(torch.tensor([[[1, 2], [1, 3]]]), torch.tensor([9]))
    cache = KVCache(slots=20)
    _, hidden = target.prefill(prompt, [8], cache, layers)
    _, nodes = target.verify(tree, torch.tensor([8]), cache, layers)
    for node in range(int(tree.valid.sum())):
        path = tree.tokens[0][tree.mask[0, node]]
        ids = torch.cat([prompt[0], path])[None]
        alone = model(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([alone[i] for i in layers], -1)[0]
        assert torch.allclose(nodes[0, node], expected[-1], atol=1e-10)
        assert torch.allclose(hidden[0], expected[:8], atol=1e-10)
    last = model.model(ids).last_hidden_state[0, -1]
    assert torch.allclose(expected[-1, -32:], last, atol=1e-12), "-1 is after the final norm"


def test_a_users_model_is_checked_once(monkeypatch):
    model = make_model("llama", vocab_size=VOCAB)
    calls = []
    check = pretrained.check
    monkeypatch.setattr(pretrained, "check", lambda t: (calls.append(t), check(t))[1])
    load_target(model)
    load_target(model)
    assert len(calls) == 1
    model.set_attn_implementation("eager")
    load_target(model)
    assert len(calls) == 2, "another attention is another question"
    with pytest.raises(ConfigError, match="keeps its dtype and device"):
        load_target(model, dtype="fp32")


def test_where_things_lie_is_told_to_config_and_tokenizer_too(tmp_path):
    make_model(dtype=torch.float32).save_pretrained(tmp_path / "inner")
    engine = redrafter.load(str(tmp_path), drafter=None, device="cpu", subfolder="inner")
    assert engine.target.vocab_size == VOCAB


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_no_such_device(device):
    with pytest.raises(ConfigError, match=f"no device '{device}'"):
        load_target(device=device)


def test_memory_grows_with_the_text():
    """On a CPU a budget of a million tokens does not take their memory before they are written."""
    target = Target(make_model("llama", max_position_embeddings=1_200_000))
    room = 2 * 1_200_000 * sum(8 * heads * size for pair in target.kv_layout().values() for heads, size, *_ in pair)
    assert room > 2**30, "else nothing is shown"
    before = psutil.Process().memory_info().rss
    for drafter in (NoDrafter(), recurrent_drafter(target)):
        parts = Engine(target, drafter, shape=Shape(width=2, length=3)).stream(PROMPTS[:2], max_new_tokens=900_000)
        for _ in range(20):
            next(parts)
        assert psutil.Process().memory_info().rss - before < room / 10


def test_prefill_in_chunks_is_prefill(monkeypatch):
    target = Target(make_model("gemma3"))
    prompts = [list(range(30)), [5, 6], list(range(20, 39))]
    whole = [c.tokens for c in Engine(target, NoDrafter()).generate(prompts, max_new_tokens=8)]
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 7)
    assert [c.tokens for c in Engine(target, NoDrafter()).generate(prompts, max_new_tokens=8)] == whole


def test_the_generation_config_is_the_models_current_one():
    model = make_model()
    target, kept = Target(model), model.generation_config
    try:
        model.generation_config = tf.GenerationConfig(eos_token_id=7)
        assert target.generation_config.eos_token_id == 7
    finally:
        model.generation_config = kept
