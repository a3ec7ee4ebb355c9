"""Quantised checkpoints through `redrafter.load`: the text is the scheme's, speculative text is plain text, and folders
that are damaged, lie or cannot run are refused in one line before anything is read."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import redrafter
from redrafter import Engine
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, RedrafterError, UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.targets import load_target
from redrafter.targets.quantised import load as quantised
from redrafter.targets.quantised.linear import RoundedLinear
from tests.helpers.quantised import LAYOUTS, ROUNDING, edit_config, write_model, write_quantised
from tests.helpers.zoo import PROMPTS, make_model

OPTIONS = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
LAYER = "model.layers.0.self_attn.q_proj"


def texts(target, drafter=None):
    drafter = NoDrafter() if drafter is None else drafter
    return [done.tokens for done in Engine(target, drafter).generate(PROMPTS[:3], **OPTIONS)]


def weights(model):
    return {name: module.weight for name, module in model.named_modules() if name.endswith("_proj")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_loads_and_speculates_exactly(layout, tmp_path):
    target = redrafter.load(write_quantised(tmp_path, layout), None, dtype="fp64", device="cpu").target
    original = weights(make_model("llama", torch.float32, head_dim=16, tie_word_embeddings=False))
    for name, weight in weights(target.model).items():
        rounded = isinstance(target.model.get_submodule(name), RoundedLinear)
        assert rounded == (layout in ROUNDING)
        gap = float((weight - original[name]).detach().abs().max() / original[name].detach().abs().max())
        assert 0 < gap < (0.02 if "8" in layout and "fp8" not in layout else 0.12)
    plain = texts(target)
    assert texts(target, NgramDrafter()) == plain
    assert len({tuple(text) for text in plain}) == 3


def test_the_rounding_of_activations_changes_the_logits(tmp_path):
    """The twin of `rounded`: without it, the weights alone give other logits."""
    model = load_target(write_quantised(tmp_path, "fp8 channel"), dtype="fp64").model
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        wanted = model(tokens).logits
        for name, module in list(model.named_modules()):
            if isinstance(module, RoundedLinear):
                plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
                plain.weight = module.weight
                model.set_submodule(name, plain)
        assert 1e-3 < float((model(tokens).logits - wanted).norm() / wanted.norm()) < 0.3


def test_one_line_of_the_log_says_what_is_in_memory(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "redrafter"):
        load_target(write_quantised(tmp_path, "awq"), dtype="bf16")
    lines = [record.message for record in caplog.records if "dequantised" in record.message]
    assert lines == [f"{tmp_path}: 14 awq layers, dequantised to bfloat16 in memory"]


def test_passes_differ_by_the_rounding_of_activations(tmp_path):
    folder = write_quantised(tmp_path, "int8")
    assert load_target(folder, dtype="fp32").precision == torch.bfloat16
    assert load_target(folder, dtype="fp64").precision == torch.float64
    assert load_target(write_quantised(tmp_path / "w", "gptq"), dtype="fp32").precision == torch.float32


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_in_4_bits(kind, tmp_path):
    """transformers joins the experts; their weights are dequantised before."""
    folder = write_model(tmp_path / "model", kind, intermediate_size=64, moe_intermediate_size=64)
    target = load_target(folder, dtype="int4")
    plain = texts(target)
    assert texts(target, NgramDrafter()) == plain
    joined, whole = (
        model.base_model.layers[0].mlp.experts.down_proj for model in (target.model, load_target(folder).model)
    )
    assert 0.01 < float(((joined - whole).norm() / whole.norm()).detach()) < 0.2
    assert torch.equal(*(m.base_model.layers[0].mlp.gate.weight for m in (target.model, load_target(folder).model)))
    with pytest.raises(UnsupportedTarget, match="rounds its inputs to fp8, and the model has no linear layer"):
        load_target(folder, dtype="fp8")


@pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")
def test_the_dequantised_weights_can_be_packed_for_a_cpu(tmp_path):
    target = load_target(write_quantised(tmp_path / "w", "int4"), dtype="stored")
    assert texts(target) == texts(load_target(tmp_path / "w", dtype="fp32"))
    with pytest.raises(UnsupportedTarget, match="is RoundedLinear; only plain Linear layers can be packed"):
        load_target(write_quantised(tmp_path / "a", "int8"), dtype="q8")


def test_the_generation_config_is_the_folders(tmp_path):
    write_quantised(tmp_path, "gptq")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 17}))
    target = load_target(tmp_path, dtype="fp32")
    assert target.generation_config.eos_token_id == 17
    assert target.model.name_or_path == str(tmp_path)


def test_an_id_is_downloaded_whole(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options, name=name) or str(tmp_path)
    )
    assert quantised.local_folder("org/name", {"revision": "r", "trust_remote_code": True}) == tmp_path
    assert asked == {"name": "org/name", "revision": "r", "allow_patterns": quantised.PATTERNS}


def test_a_users_own_quantization_config_goes_to_transformers(tmp_path):
    config = make_model("llama", torch.float32).config
    config = type(config).from_dict(config.to_dict() | {"quantization_config": {"quant_method": "awq"}})
    assert quantised.takes(config, None, {})
    assert not quantised.takes(config, None, {"quantization_config": object()})
    with pytest.raises(ConfigError, match="two ways to quantise"):
        quantised.takes(config, "int4", {"quantization_config": object()})


@pytest.fixture
def unread(monkeypatch):
    """Nothing may be loaded."""

    def never(*_, **__):
        raise AssertionError("weights were read before the check")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", never)


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def drop_layer(folder):
    edit_tensors(folder, lambda t: [t.pop(f"{LAYER}.{end}") for end in ("qweight", "qzeros", "scales", "g_idx")])


def exchange(tensors):
    for end in ("qweight", "qzeros", "scales"):
        tensors[f"{LAYER}.{end}"] = tensors[f"model.layers.0.mlp.up_proj.{end}"].clone()


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])


def config_of(layout, **changes):
    return {"quantization_config": LAYOUTS[layout][1] | changes}


NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
LIES = {
    "nf4": ("gptq", lambda f: edit_config(f, **NF4), "quantised with 'bitsandbytes', which redrafter does not read"),
    "3 bits": ("gptq", lambda f: edit_config(f, **config_of("gptq", bits=3)), "GPTQ in 3 bits"),
    "another size of groups": ("awq", lambda f: edit_config(f, **config_of("awq", group_size=8)), "has the shape"),
    "no size of groups": ("awq", lambda f: edit_config(f, **config_of("awq", group_size=10**400)), "no groups of"),
    "an ignored layer": ("int4", lambda f: edit_config(f, **config_of("int4", ignore=[LAYER])), "ignores it"),
    "an excluded layer": (
        "fine fp8", lambda f: edit_config(f, **config_of("fine fp8", modules_to_not_convert=["q_proj"])), "excludes",
    ),
    "no group": ("int4", lambda f: edit_config(f, **config_of("int4", config_groups={})), "no group"),
    "truncated": ("gptq", cut, "cannot read"),
    "no file": ("gptq", lambda f: (f / "model.safetensors").unlink(), "has no file model.safetensors"),
    "an index to elsewhere": (
        "gptq",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        "names '../b.safetensors'",
    ),
    "no scales": ("gptq", lambda f: edit_tensors(f, lambda t: t.pop(f"{LAYER}.scales")), "has no scales"),
    "no layer": ("gptq", drop_layer, "its files have no"),
    "a shape that lies": (
        "int4",
        lambda f: edit_tensors(f, lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([2**40, 2**40])})),
        "and its layer the shape",
    ),
    "scales of another type": (
        "fp8 block", lambda f: edit_tensors(f, lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(4, 2).int()})),
        "has the type torch.int32",
    ),
    "fp8 without scales": (
        "fine fp8", lambda f: edit_tensors(f, lambda t: t.pop(f"{LAYER}.weight_scale_inv")), "does not say how",
    ),
    "another layer": ("awq", lambda f: edit_tensors(f, exchange), "and its model (64, 32)"),
    "a giant": ("int4", lambda f: edit_config(f, hidden_size=2**20, intermediate_size=2**30), "more weights than"),
    "groups of activations that do not fit": (
        "fine fp8", lambda f: edit_config(f, **config_of("fine fp8", weight_block_size=[16, 20])), "no groups of 20",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_lies_is_refused_in_one_line(lie, request, tmp_path):
    layout, edit, reason = LIES[lie]
    if lie != "no layer":  # only the model knows all names
        request.getfixturevalue("unread")
    folder = write_quantised(tmp_path, layout)
    edit(folder)
    with pytest.raises(RedrafterError) as caught:
        load_target(folder, dtype="fp32")
    assert isinstance(caught.value, CorruptCheckpoint | UnsupportedTarget | ModelNotFound)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_folder_that_does_not_lie_is_read(unread, tmp_path):
    """The twin of the test above."""
    with pytest.raises(CorruptCheckpoint, match="weights were read before the check"):
        load_target(write_quantised(tmp_path, "int4"), dtype="fp32")
