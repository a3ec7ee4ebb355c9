"""Loads targets with packed weights: from a GGUF file as the file has them, or quantised from a transformers model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from redrafter.errors import CorruptCheckpoint
from redrafter.kernels.cpu_pass import library
from redrafter.kernels.cpu_pass.matrices import Floats, Matrix, quantise
from redrafter.kernels.cpu_pass.model import LayerWeights, PassModel
from redrafter.targets.cpu.families import Rotations, check, is_gemma, layer_kinds, sizes_of
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.gguf.config import config_of
from redrafter.targets.gguf.file import GGUFFile
from redrafter.targets.gguf.tokenizer import tokenizer_of
from redrafter.targets.gguf.weights import GGUFWeights

BITS: dict[str, Literal[4, 8]] = {"q8": 8, "q4": 4}
"""The dtypes that quantise a model's matrices at load."""
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
    file = GGUFFile(path)
    config = config_of(file)
    config._name_or_path = name or path.stem
    check(config)
    weights = GGUFWeights(file, config)
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
        config._name_or_path,
        Rotations(config, weights.rotation_factors()),
        load_model or (lambda: dequantised(path)),
    )


def dequantised(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a GGUF file in transformers, its weights in a float dtype."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    except (ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CorruptCheckpoint(f"transformers cannot read {path}: {reason}") from error
    return model.eval()


def from_module(
    model: Any, tokenizer: Any, name: str, bits: Literal[4, 8], load_model: Callable[[], Any]
) -> PackedTarget:
    """A transformers model, its matrices rounded to 8 or 4 bits in groups of 32."""
    config = model.config.get_text_config()
    check(config)
    base = model.base_model
    weights = _ModuleWeights(config, bits)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    packed = PassModel(
        sizes_of(config),
        (weights.layer(i, layer) for i, layer in enumerate(base.layers)),
        weights.matrix(base.embed_tokens.weight),
        None if tied else weights.matrix(model.get_output_embeddings().weight),
        weights.norm(base.norm.weight),
    )
    generation = getattr(model, "generation_config", None)
    return PackedTarget(packed, config, tokenizer, name, Rotations(config), load_model, generation)


class _ModuleWeights:
    """Weights of transformers modules, for the compiled pass."""

    def __init__(self, config: Any, bits: Literal[4, 8]) -> None:
        self.config, self.bits = config, bits

    def layer(self, index: int, module: Any) -> LayerWeights:
        attention, mlp = module.self_attn, module.mlp
        linears = {x: getattr(attention, f"{x}_proj") for x in "qkvo"}
        linears |= {x: getattr(mlp, f"{x}_proj") for x in ("gate", "up", "down")}
        vectors = {f"{x}_bias": _numpy(m.bias) for x, m in linears.items() if m.bias is not None}
        names = GEMMA_NORMS if is_gemma(self.config) else NORMS
        vectors |= {name: self.norm(getattr(module, theirs).weight) for name, theirs in names.items()}
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                vectors[name] = self.norm(getattr(attention, name).weight)
        rotation, window = layer_kinds(self.config)[index]
        return LayerWeights({x: self.matrix(m.weight) for x, m in linears.items()}, vectors, rotation, window)

    def matrix(self, weight: Tensor) -> Matrix:
        whole = _numpy(weight)
        return quantise(whole, self.bits) if whole.shape[1] % GROUP == 0 else Floats(whole)

    def norm(self, weight: Tensor) -> np.ndarray[Any, Any]:
        """Gemma stores a norm's weight minus one."""
        made: np.ndarray[Any, Any] = _numpy(weight) + np.float32(is_gemma(self.config))
        return made


def _numpy(x: Tensor) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = x.detach().float().numpy()
    return made
