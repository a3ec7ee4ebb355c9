"""Loads targets with packed weights: from a GGUF file as the file has them, or quantised from a transformers model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats, Matrix
from redrafter.kernels.cpu.model import LayerWeights, PassModel
from redrafter.kernels.cpu.packed import quantise
from redrafter.targets.cpu.families import Rotations, check, has_plain_rotations, is_gemma, layer_kinds, sizes_of
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.gguf.config import config_of, transformers_config
from redrafter.targets.gguf.file import GGUFFile
from redrafter.targets.gguf.tokenizer import tokenizer_of
from redrafter.targets.gguf.weights import GGUFWeights
from redrafter.targets.media_tokens import media_tokens

BITS: dict[str, Literal[4, 8] | None] = {"q8": 8, "q4": 4, "stored": None}
"""The dtypes that pack a model's matrices at load: rounded to so many bits, or not rounded."""
GROUP = 32
NORMS = {"before": "input_layernorm", "before_mlp": "post_attention_layernorm"}
GEMMA_NORMS = {
    "before": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


def available() -> bool:
    """Whether packed weights can run here: there is a C++ compiler, or a library that was compiled before."""
    return library.library() is not None


def from_gguf(
    path: Path, tokenizer: Any = None, name: str | None = None, load_model: Callable[[], Any] | None = None
) -> PackedTarget:
    """A model whose weights stay as the file has them. `load_model` loads the same model in transformers."""
    file, config, weights = _open(path)
    rotated = config if has_plain_rotations(config) else transformers_config(config, file)
    packed = PassModel(
        sizes_of(config),
        (weights.layer(i) for i in range(config.num_hidden_layers)),
        weights.embedding(),
        weights.head(),
        weights.final_norm(),
    )
    return PackedTarget(
        packed,
        config,
        tokenizer or tokenizer_of(file),
        name or path.stem,
        Rotations(rotated, weights.rotation_factors()),
        load_model or (lambda: dequantised(path)),
    )


def _open(path: Path) -> tuple[GGUFFile, Any, GGUFWeights]:
    file = GGUFFile(path)
    config = config_of(file)
    check(config)
    return file, config, GGUFWeights(file, config)


@torch.no_grad()
def dequantised(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a GGUF file in transformers, its weights in a float dtype.

    transformers reads GGUF files itself, but drops rope_freqs and the scaling of rotary embeddings.
    """
    from transformers import AutoModelForCausalLM

    file, found, weights = _open(path)
    config = transformers_config(found, file)
    config._name_or_path = str(path.parent)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    base = model.base_model
    base.embed_tokens.weight.copy_(_tensor(weights.embedding()))
    if (head := weights.head()) is not None:
        model.get_output_embeddings().weight.copy_(_tensor(head))
    offset = float(is_gemma(config))  # Gemma's modules add one to a norm's weight; its files have it added
    base.norm.weight.copy_(torch.from_numpy(weights.final_norm()) - offset)
    for index, module in enumerate(base.layers):
        layer, linears = weights.layer(index), _linears(module)
        for name, linear in linears.items():
            linear.weight.copy_(_tensor(layer.matrices[name]))
            if linear.bias is not None:
                bias = layer.vectors.get(f"{name}_bias")
                linear.bias.copy_(torch.zeros(()) if bias is None else torch.from_numpy(bias))
        for name, norm in _norms(module, config).items():
            norm.weight.copy_(torch.from_numpy(layer.vectors[name]) - offset)
    if (factors := weights.rotation_factors()) is not None:
        for name in ("inv_freq", "original_inv_freq"):
            getattr(base.rotary_emb, name).div_(factors)
    return model


def from_module(
    model: Any, tokenizer: Any, name: str, bits: Literal[4, 8] | None, load_model: Callable[[], Any]
) -> PackedTarget:
    """A transformers model, its matrices rounded to 8 or 4 bits in groups of 32; None: in the fewest bytes, exactly."""
    config = model.config.get_text_config()
    check(config)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedTarget(f"{name} is quantised already; leave the dtype out")
    base = getattr(model.base_model, "language_model", model.base_model)  # the decoder of a multimodal model
    weights = _ModuleWeights(config, bits)
    embedding, head = base.embed_tokens, model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedTarget(f"{name} embeds tokens by {type(embedding).__name__}; packing needs an Embedding")
    _require_linear("the output embedding", head)
    packed = PassModel(
        sizes_of(config),
        (weights.layer(i, layer) for i, layer in enumerate(base.layers)),
        weights.matrix(embedding.weight),
        None if head.weight is embedding.weight else weights.matrix(head.weight),
        weights.norm(base.norm.weight),
    )
    generation = getattr(model, "generation_config", None)
    target = PackedTarget(packed, config, tokenizer, name, Rotations(config), load_model, generation)
    target.media_tokens = media_tokens(model.config)
    return target


@dataclass(frozen=True)
class _Part:
    """Some rows of a linear layer."""

    weight: Tensor
    bias: Tensor | None


def _require_linear(name: str, module: Any) -> None:
    """A subclass, such as an adapter's, may compute something else."""
    if type(module) is _Part:  # of a layer that was looked at
        return
    if type(module) is not nn.Linear or module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedTarget(f"{name} is {type(module).__name__}; only plain Linear layers can be packed")
    if getattr(module, "bias", None) is not None and name == "the output embedding":
        raise UnsupportedTarget("the output embedding has a bias, which the compiled pass cannot add")


def _linears(layer: Any) -> dict[str, Any]:
    """The linear layers of a decoder layer, or parts of one, as the compiled pass names them."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = {"o": attention.o_proj, "down": mlp.down_proj}
    if hasattr(attention, "qkv_proj"):  # Phi-3 and Phi-4
        joint, width = attention.qkv_proj, attention.o_proj.in_features
        kv_width = (joint.out_features - width) // 2
        linears |= dict(zip("qkv", _parts(joint, (width, kv_width, kv_width)), strict=True))
        linears |= dict(zip(("gate", "up"), _parts(mlp.gate_up_proj, (mlp.down_proj.in_features,) * 2), strict=True))
    else:
        linears |= {name: getattr(attention, f"{name}_proj") for name in "qkv"}
        linears |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up")}
    return linears


def _parts(joint: Any, rows: tuple[int, ...]) -> list[Any]:
    """Linear layers that one layer joins, as views of its rows."""
    _require_linear("a joint projection", joint)
    biases = [None] * len(rows) if joint.bias is None else joint.bias.split(rows)
    return [_Part(weight, bias) for weight, bias in zip(joint.weight.split(rows), biases, strict=True)]


def _norms(layer: Any, config: Any) -> dict[str, Any]:
    """The norms of a decoder layer, as the compiled pass names them."""
    names = GEMMA_NORMS if is_gemma(config) else NORMS
    norms = {name: getattr(layer, theirs) for name, theirs in names.items()}
    own = [name for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
    return norms | {name: getattr(layer.self_attn, name) for name in own}


class _ModuleWeights:
    """Weights of transformers modules, for the compiled pass."""

    def __init__(self, config: Any, bits: Literal[4, 8] | None) -> None:
        self.config, self.bits = config, bits

    def layer(self, index: int, module: Any) -> LayerWeights:
        linears = _linears(module)
        for name, linear in linears.items():
            _require_linear(f"{name}_proj of layer {index}", linear)
        vectors = {f"{x}_bias": _numpy(m.bias) for x, m in linears.items() if m.bias is not None}
        vectors |= {name: self.norm(norm.weight) for name, norm in _norms(module, self.config).items()}
        rotation, window = layer_kinds(self.config)[index]
        return LayerWeights({x: self.matrix(m.weight) for x, m in linears.items()}, vectors, rotation, window)

    def matrix(self, weight: Tensor) -> Matrix:
        if self.bits is None:
            return _exact(weight)
        whole = _numpy(weight)
        return quantise(whole, self.bits) if whole.shape[1] % GROUP == 0 else Floats(whole)

    def norm(self, weight: Tensor) -> np.ndarray[Any, Any]:
        """Gemma stores a norm's weight minus one."""
        made: np.ndarray[Any, Any] = _numpy(weight) + np.float32(is_gemma(self.config))
        return made


def _exact(weight: Tensor) -> Floats:
    """The matrix in bf16 or fp16 if that changes no weight, as in a checkpoint of that dtype; otherwise in fp32."""
    weight = weight.detach().float()
    if torch.equal((bf16 := weight.bfloat16()).float(), weight):
        return Floats(bf16.view(torch.int16).numpy().view(np.uint16))
    if torch.equal((fp16 := weight.half()).float(), weight):
        return Floats(fp16.numpy())
    return Floats(weight.numpy())


def _numpy(x: Tensor) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = x.detach().float().numpy()
    return made


def _tensor(matrix: Matrix) -> Tensor:
    return torch.from_numpy(matrix.dequantise())
