"""What the readers of quantised layers give: the values of the formats' own code, and those of plain loops.

golden.safetensors holds small random layers as compressed-tensors 0.20.0, AutoAWQ 0.2.9, GPTQModel 7.7.0 and
transformers 5.19 packed them, and the weights and rounded activations that they gave back for these, in fp32.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from redrafter.errors import CorruptCheckpoint, UnsupportedTarget
from redrafter.targets.quantised import compressed_tensors
from redrafter.targets.quantised.files import WeightFiles
from redrafter.targets.quantised.linear import RoundedLinear, Rounding
from redrafter.targets.quantised.load import FORMATS
from redrafter.targets.quantised.stored import pack, unpack
from tests.helpers.quantised import LAYOUTS, compressed

GOLDEN = load_file(Path(__file__).parent / "golden.safetensors")
SIZE = 8
"""Of the groups of the golden layers."""
BLOCK = [4, 16]


def read(folder, config, parts):
    """The weight of one layer with these parts, in fp32."""
    save_file({f"layer.{end}": part.contiguous() for end, part in parts.items()}, folder / "model.safetensors")
    [layer] = FORMATS[config["quant_method"]](config, WeightFiles(folder))
    return layer.dequantise(torch.float32)


def golden(case):
    return {name.removeprefix(f"{case}."): x for name, x in GOLDEN.items() if name.startswith(f"{case}.")}


COMPRESSED = sorted({name.partition(".")[0] for name in GOLDEN if name.count("-") == 3})


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_as_its_own_code_reads_them(case, tmp_path):
    kind, bits, symmetric, strategy = case.split("-")
    weights = {"num_bits": int(bits), "type": "float" if kind == "float" else "int", "symmetric": symmetric == "sym"}
    weights |= {"strategy": strategy, "group_size": SIZE if strategy == "group" else None}
    weights |= {"block_structure": BLOCK} if strategy == "block" else {}
    parts = golden(case)
    wanted = parts.pop("result")
    layout = "pack-quantized" if kind == "pack" else f"{kind}-quantized"
    assert torch.equal(read(tmp_path, compressed(layout, weights), parts), wanted)


def test_every_kind_is_among_the_golden_layers():
    assert len(COMPRESSED) == 18


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_as_its_own_code_reads_it(bits, version, tmp_path):
    parts = golden(f"gptq-{bits}")
    wanted = parts.pop("result")
    config = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "desc_act": False}
    if version == 1:
        parts["qzeros"] = parts["qzeros"] - (0x11111111 if bits == 4 else 0x01010101)
    config |= {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    assert torch.equal(read(tmp_path, config, parts), wanted)


def test_twin_the_other_version_gives_other_weights(tmp_path):
    parts = golden("gptq-4")
    wanted = parts.pop("result")
    assert not torch.equal(read(tmp_path, LAYOUTS["gptq"][1] | {"group_size": SIZE}, parts), wanted)


def test_awq_as_its_own_code_reads_it(tmp_path):
    parts = golden("awq")
    wanted = parts.pop("result")
    assert torch.equal(read(tmp_path, LAYOUTS["awq"][1] | {"group_size": SIZE}, parts), wanted)


def test_fine_grained_fp8_as_transformers_reads_it(tmp_path):
    parts = golden("fine_fp8")
    wanted = parts.pop("result")
    config = LAYOUTS["fine fp8"][1] | {"weight_block_size": [4, 8]}
    assert torch.equal(read(tmp_path, config, parts), wanted)


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["token", "group", "tensor"])
def test_activations_are_rounded_as_the_format_says(kind, strategy):
    to = "fp8" if kind == "float" else "int8"
    rounding = Rounding(to=to, group=SIZE if strategy == "group" else None, static=strategy == "tensor")
    parts = golden(f"activations-{kind}-{strategy}")
    x = GOLDEN["activations"]
    made = rounding(x, parts.get("input_scale"))
    assert torch.equal(made, parts["result"])
    assert not torch.equal(made, x)
    alone = torch.stack([rounding(row[None], parts.get("input_scale"))[0] for row in x])
    assert torch.equal(made, alone), "a token's values depend on that token alone"


def test_a_rounded_layer_keeps_its_weight_and_bias():
    linear = torch.nn.Linear(8, 4)
    x = torch.randn(3, 8)
    rounded = RoundedLinear(linear, Rounding(to="int8"))
    assert torch.equal(rounded(x), linear(Rounding(to="int8")(x)))
    assert rounded.weight is linear.weight
    assert list(rounded.state_dict()) == list(linear.state_dict())


@pytest.mark.parametrize("shape", [(3, 5), (1, 4), (4, 1), (1, 1)])
def test_words_of_any_shape(shape):
    codes = torch.randint(16, (shape[0], 8 * shape[1]), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes), 4), codes)
    assert torch.equal(unpack(pack(codes).T.contiguous().T, 4), codes)


REFUSED = {
    "AWQ 'gemv'": LAYOUTS["awq"][1] | {"version": "GEMV"},
    "AWQ in 3 bits": LAYOUTS["awq"][1] | {"bits": 3},
    "GPTQ in 2 bits": LAYOUTS["gptq"][1] | {"bits": 2},
    "desc_act": LAYOUTS["gptq"][1] | {"desc_act": True},
    "GPTQ layout 'marlin'": LAYOUTS["gptq"][1] | {"checkpoint_format": "marlin"},
    "single layers": LAYOUTS["gptq"][1] | {"dynamic": {"layer": {"bits": 8}}},
    "FP8 numbers 'e5m2'": LAYOUTS["fine fp8"][1] | {"fmt": "e5m2"},
    "FP8 scales of the format 'ue8m0'": LAYOUTS["fine fp8"][1] | {"scale_fmt": "ue8m0"},
    "activation scales 'dynamic'": LAYOUTS["static fp8"][1] | {"activation_scheme": "dynamic"},
    "the format 'nvfp4-pack-quantized'": compressed("nvfp4-pack-quantized", {"num_bits": 4}),
    "2-bit int weights": compressed("pack-quantized", {"num_bits": 2, "group_size": SIZE}),
    "activation order": compressed("pack-quantized", {"num_bits": 4, "group_size": SIZE, "actorder": "group"}),
    "scales for each 'tensor', dynamic = True": compressed(
        "int-quantized", {"num_bits": 8}, {"num_bits": 8, "strategy": "tensor", "dynamic": True}
    ),
    "4-bit 'float' activations": compressed("int-quantized", {"num_bits": 8}, {"num_bits": 4, "type": "float"}),
    "a transform_config": compressed("int-quantized", {"num_bits": 8}) | {"transform_config": {"groups": 1}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(name):
    with pytest.raises(UnsupportedTarget) as caught:
        FORMATS[REFUSED[name]["quant_method"]](REFUSED[name], {})
    assert name in str(caught.value)


def test_an_order_of_inputs_is_refused_by_name(tmp_path):
    parts = golden("gptq-4")
    parts.pop("result")
    parts["g_idx"] = parts["g_idx"].flip(0)
    with pytest.raises(UnsupportedTarget, match=r"activation order \(the g_idx of 'layer'\)"):
        read(tmp_path, LAYOUTS["gptq v2"][1] | {"group_size": SIZE}, parts)


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+$",
        "re:.*a.*a.*a.*b",
        "re:" + "a?" * 30 + "a" * 30,
        "re:" + "(a|a)" * 30 + "b",
        "re:" + "|" * 100,
        "re:a{99999999999}",
        "re:(",
        "re:" + "a" * 500,
    ],
)
def test_patterns_that_could_take_for_ever_are_refused(pattern, tmp_path):
    parts = golden("int-8-sym-tensor")
    parts.pop("result")
    config = compressed("int-quantized", {"num_bits": 8}) | {"ignore": [pattern]}
    with pytest.raises(CorruptCheckpoint, match="pattern"):
        read(tmp_path, config, parts)
    with pytest.raises(CorruptCheckpoint, match="pattern"):  # before a layer is tried
        FORMATS[config["quant_method"]](config, {})


def test_patterns_that_models_use_are_read():
    for used in ("re:.*mlp.gate$", r"re:.*layers\.\d+\.mlp\.(gate|up|down)_proj", "re:vision.*", "re:.*(q|k|v)_proj.*"):
        assert compressed_tensors.Targets.of([used]).patterns
    with pytest.raises(CorruptCheckpoint, match="at most 64"):
        compressed_tensors.Targets.of(["re:a"] * 65)
    with pytest.raises(CorruptCheckpoint, match="a name of 129 characters"):
        compressed_tensors.Targets.of(["re:.*a.*a.*b"]).match("a" * 129)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "too large"])
def test_an_index_that_is_no_file(kind, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    if kind == "a pipe":
        os.mkfifo(index)
    elif kind == "a folder":
        index.mkdir()
    else:
        with index.open("wb") as file:
            file.truncate(2**26 + 1)
    with pytest.raises(CorruptCheckpoint, match="it is no file of at most 64 MiB"):
        WeightFiles(tmp_path)
