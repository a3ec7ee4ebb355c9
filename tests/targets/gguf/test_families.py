"""Architectures that transformers does not read from GGUF files: files as llama.cpp's converter writes them."""

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

from redrafter import Engine
from redrafter.drafters import NgramDrafter
from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.targets import Target, load_target
from redrafter.targets.cpu import packed_load
from tests.targets.gguf.test_blocks import write
from tests.targets.gguf.test_model import logits

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")

COMMON = {
    **{"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "eos_token_id": 5},
}
GRANITE = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.3}
CONFIGS = {
    "granite": lambda: tf.GraniteConfig(**COMMON, **GRANITE),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def in_pairs(weight, heads):
    """Rows of each head from a0 a1 ... b0 b1 ... to a0 b0 a1 b1 ..."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def make_model(architecture):
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


def make_file(path, architecture, model, paired=None, **changes):
    """The file of a transformers model. paired: whether queries and keys lie in pairs; default: as llama.cpp's do."""
    paired = architecture != "phi3" if paired is None else paired
    tensors = {}
    for name, value in model.state_dict().items():
        part, weight = name.removesuffix(".weight"), value.numpy()
        if part in WHOLE:
            theirs = WHOLE[part]
        else:
            _, _, index, part = part.split(".", 3)
            theirs = f"blk.{index}.{NAMES[part]}"
            if paired and part in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = in_pairs(weight, 4 if "q_proj" in part else 2)
        tensors[f"{theirs}.weight"] = (np.ascontiguousarray(weight), gguf.GGMLQuantizationType.F32)
    fields = {
        **{"block_count": 4, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"rope.freq_base": 10000.0, "rope.dimension_count": 16},
    }
    if architecture == "granite":
        fields |= {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 3.0, "attention.scale": 0.3}
    fields["rope.freq_base"] = float(model.config.rope_parameters["rope_theta"])
    fields["attention.layer_norm_rms_epsilon"] = float(model.config.rms_norm_eps)
    metadata = {f"{architecture}.{name}": value for name, value in (fields | changes).items()}
    return write(path, tensors, metadata | {"tokenizer.ggml.eos_token_id": 5}, architecture)


def gap(path, model):
    ids = torch.randint(40, (1, 20), generator=torch.Generator().manual_seed(1))
    wanted = logits(Target(model), ids)
    return float((logits(load_target(path, device="cpu"), ids) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path, architecture):
    model = make_model(architecture)
    path = make_file(tmp_path / "x.gguf", architecture, model)
    assert gap(path, model) < 1e-5
    assert gap(path, packed_load.dequantised(path)) < 1e-5
    if architecture != "phi3":  # the twin: heads in the other order
        assert gap(make_file(tmp_path / "wrong.gguf", architecture, model, paired=False), model) > 1e-2


@pytest.mark.parametrize("architecture", CONFIGS)
def test_speculative_texts_are_plain_ones(tmp_path, architecture):
    target = load_target(make_file(tmp_path / "x.gguf", architecture, make_model(architecture)), device="cpu")
    engine = Engine(target, NgramDrafter())
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        for prompt in ([3, 1, 4, 1, 5, 9, 3, 1, 4], [7]):
            ours, plain = (e.generate(prompt, max_new_tokens=24, **options) for e in (engine, engine.plain()))
            assert ours.tokens == plain.tokens


def test_a_window_that_hides_tokens_is_refused(tmp_path):
    model = make_model("phi3")
    name = "attention.sliding_window"
    assert gap(make_file(tmp_path / "whole.gguf", "phi3", model, **{name: 128}), model) < 1e-5
    with pytest.raises(
        UnsupportedTarget, match=r"phi3.attention.sliding_window = 64; redrafter needs none, or the whole"
    ):
        load_target(make_file(tmp_path / "x.gguf", "phi3", model, **{name: 64}), device="cpu")
