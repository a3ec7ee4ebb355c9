"""Tiny models in the layouts in which quantised checkpoints are published, packed by plain loops."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.zoo import make_model

GROUP = 16
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
FP8 = torch.float8_e4m3fn


def words(values: Tensor, bits: int, order: range | list[int]) -> Tensor:
    """(n, m) integers -> (n, words) int32; `order[i]` says which value of a word lies at its i-th lowest bits."""
    count = 32 // bits
    rows = []
    for row in values.tolist():
        row += [0] * (-len(row) % count)
        packed = [sum(row[at + order[i]] << bits * i for i in range(count)) for at in range(0, len(row), count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def codes(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, inputs) -> codes from 0, zero points above 0 and scales in fp16; (outputs, groups) each."""
    most, grouped = 2**bits - 1, weight.float().unflatten(1, (-1, group))
    least, largest = grouped.amin(2).clamp(max=-1e-3), grouped.amax(2).clamp(min=1e-3)
    scales = ((largest - least) / most).half()
    zeros = (-least / scales.float()).round().clamp(1, most)
    made = (grouped / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, most)
    return made.flatten(1).int(), zeros.int(), scales


def gptq(weight: Tensor, bits: int = 4, version: int = 1) -> dict[str, Tensor]:
    made, zeros, scales = codes(weight, bits, GROUP)
    in_order = range(32 // bits)
    return {
        "qweight": words(made, bits, in_order).T,
        "qzeros": words((zeros - int(version == 1)).T, bits, in_order),
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    made, zeros, scales = codes(weight, 4, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": words(made.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T}


def packed(weight: Tensor, bits: int = 4, symmetric: bool = True) -> dict[str, Tensor]:
    """compressed-tensors: integers with a sign, stored with an offset."""
    in_order = range(32 // bits)
    if symmetric:
        grouped, most = weight.float().unflatten(1, (-1, GROUP)), 2 ** (bits - 1)
        scales = (grouped.abs().amax(2) / (most - 0.5)).bfloat16()
        made = (grouped / scales.float()[:, :, None]).round().clamp(-most, most - 1).flatten(1) + most
        zeros = {}
    else:
        made, zero, scales = codes(weight, bits, GROUP)
        zeros = {"weight_zero_point": words(zero.T, bits, in_order).T}
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words(made.int(), bits, in_order), "weight_scale": scales, "weight_shape": shape} | zeros


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv", size: int = GROUP) -> dict[str, Tensor]:
    made, scales = (
        torch.empty(weight.shape, dtype=FP8),
        torch.empty(-(-weight.shape[0] // size), -(-weight.shape[1] // size)),
    )
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = weight[at].abs().max() / 448
            made[at] = (weight[at] / scales[i, j]).to(FP8)
    return {"weight": made, name: scales}


def fp8_channel(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scales).to(FP8), "weight_scale": scales}


def fp8_static(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().max().reshape(1) / 448
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor([0.05])}


def int8_channel(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _int4(symmetric: bool, bits: int = 4) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    return compressed("pack-quantized", weights)


TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False}
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "int4": (packed, _int4(True)),
    "int4 zero points": (lambda w: packed(w, symmetric=False), _int4(False)),
    "int8 packed": (lambda w: packed(w, 8), _int4(True, 8)),
    "fp8 channel": (
        fp8_channel, compressed("float-quantized", CHANNEL | {"type": "float"}, TOKEN | {"type": "float"}),
    ),
    "fp8 block": (
        lambda w: fp8_blocks(w, "weight_scale"),
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [GROUP, GROUP]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": GROUP, "dynamic": True},
        ),
    ),
    "int8": (int8_channel, compressed("int-quantized", CHANNEL | {"type": "int"}, TOKEN | {"type": "int"})),
    "fine fp8": (
        fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP], "fmt": "e4m3",
         "modules_to_not_convert": ["lm_head"]},
    ),
    "static fp8": (fp8_static, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": None},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "gptq v2": (
        lambda w: gptq(w, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
         "checkpoint_format": "gptq_v2"},
    ),
    "gptq 8": (
        lambda w: gptq(w, 8),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}  # fmt: skip
"""How to pack a layer, and the `quantization_config`, of each published layout."""
ROUNDING = ("fp8 channel", "fp8 block", "int8", "fine fp8", "static fp8")
"""Layouts whose schemes round activations."""


def write_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A model as transformers saves it."""
    make_model(kind, torch.float32, head_dim=16, tie_word_embeddings=False, **changes).save_pretrained(folder)
    return folder


def write_quantised(folder: Path, layout: str, kind: str = "llama") -> Path:
    """The same model with its linear layers in a published layout."""
    pack, config = LAYOUTS[layout]
    write_model(folder, kind)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.{end}": part.contiguous() for end, part in pack(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=config)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
