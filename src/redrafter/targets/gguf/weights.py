"""From a GGUF file's tensors to the weights of the compiled pass."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu.matrices import Floats, Matrix
from redrafter.kernels.cpu.model import LayerWeights, shapes_of
from redrafter.targets.cpu.families import head_size, layer_kinds, sizes_of
from redrafter.targets.gguf.blocks import read
from redrafter.targets.gguf.file import GGUFFile

Array = np.ndarray[Any, Any]
MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
JOINT = {"phi3": {"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")}}
"""Matrices that an architecture's files hold as one, one behind the other."""
PAIRED = ("llama", "granite", "smollm3")
"""llama.cpp turns neighbouring pairs of these architectures' queries and keys, transformers turns halves."""
VECTORS = {
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "before": "attn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "after_attention": "post_attention_norm.weight",
    "before_mlp": "ffn_norm.weight",
    "after_mlp": "post_ffw_norm.weight",
}
NORMS = ("before", "before_mlp")
HEAD_NORMS = ("q_norm", "k_norm")
REQUIRED = {
    **dict.fromkeys(("llama", "granite", "phi3", "smollm3"), NORMS),
    "qwen2": (*NORMS, "q_bias", "k_bias", "v_bias"),
    "qwen3": (*NORMS, *HEAD_NORMS),
    "gemma3": (*NORMS, *HEAD_NORMS, "after_attention", "after_mlp"),
}
"""Vectors that every layer of an architecture has."""
OPTIONAL = {"llama": ("q_bias", "k_bias", "v_bias", "o_bias")}
"""Vectors that layers of an architecture may have."""
ROTATION_FACTORS = "rope_freqs.weight"


class GGUFWeights:
    """The weights of a model in a file, checked against its configuration."""

    def __init__(self, file: GGUFFile, config: Any) -> None:
        self.file, self.config = file, config
        self._architecture = file.metadata["general.architecture"]
        self._shapes = shapes_of(sizes_of(config))
        self._pairs = self._architecture in PAIRED
        self._joint = JOINT.get(self._architecture, {})
        self._check_names()

    def _check_names(self) -> None:
        """A tensor that the pass would not use means another model."""
        vectors = (*REQUIRED[self._architecture], *OPTIONAL.get(self._architecture, ()))
        joined = {name for names in self._joint.values() for name in names}
        matrices = [*(theirs for name, theirs in MATRICES.items() if name not in joined), *self._joint]
        parts = [f"{theirs}.weight" for theirs in matrices] + [VECTORS[name] for name in vectors]
        known = {"token_embd.weight", "output.weight", "output_norm.weight"}
        known |= {f"blk.{i}.{part}" for i in range(self.config.num_hidden_layers) for part in parts}
        if self._architecture == "llama":
            known.add(ROTATION_FACTORS)
        for name in self.file.tensors:
            if name not in known:
                raise UnsupportedTarget(
                    f"{self.file.path} has the tensor {name}, which redrafter does not use in a {self._architecture} "
                    "model; use another file"
                )

    def layer(self, index: int) -> LayerWeights:
        matrices: dict[str, Matrix] = {}
        for theirs, names in self._joint.items():
            matrices |= self._divided(f"blk.{index}.{theirs}.weight", names)
        for name, theirs in MATRICES.items():
            if name not in matrices:
                matrix = self._read(f"blk.{index}.{theirs}.weight", self._shapes[name])
                matrices[name] = self._in_halves(matrix) if self._pairs and name in "qk" else matrix
        vectors = {}
        for name in (*REQUIRED[self._architecture], *OPTIONAL.get(self._architecture, ())):
            theirs = f"blk.{index}.{VECTORS[name]}"
            if name in REQUIRED[self._architecture] or theirs in self.file.tensors:
                vector = self._read(theirs, self._shapes[name])
                turned = self._pairs and name in ("q_bias", "k_bias")
                vectors[name] = (self._in_halves(vector) if turned else vector).dequantise()
        rotation, window = layer_kinds(self.config)[index]
        return LayerWeights(matrices, vectors, rotation, window)

    def embedding(self) -> Matrix:
        return self._read("token_embd.weight", (self.config.vocab_size, self.config.hidden_size))

    def head(self) -> Matrix | None:
        """The output embedding; None if the input embedding is used for both."""
        if self.config.tie_word_embeddings:
            return None
        return self._read("output.weight", (self.config.vocab_size, self.config.hidden_size))

    def final_norm(self) -> Array:
        return self._read("output_norm.weight", (self.config.hidden_size,)).dequantise()

    def rotation_factors(self) -> Tensor | None:
        """What divides the rotary frequencies, in files of Llama 3."""
        if ROTATION_FACTORS not in self.file.tensors:
            return None
        found = self._read(ROTATION_FACTORS, (head_size(self.config) // 2,)).dequantise()
        if not (np.isfinite(found) & (found > 0)).all():
            raise self.file.corrupt(f"the tensor {ROTATION_FACTORS} has numbers that divide no frequency")
        return torch.from_numpy(found.copy())

    def _read(self, name: str, shape: tuple[int, ...]) -> Matrix:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise self.file.corrupt(f"it has no tensor {name}")
        if tensor.shape != shape:
            raise self.file.corrupt(f"the tensor {name} has the shape {tensor.shape}, and its metadata say {shape}")
        found = read(tensor)
        return Floats(found.dequantise().reshape(shape)) if len(shape) == 1 else found

    def _divided(self, tensor: str, names: Sequence[str]) -> dict[str, Matrix]:
        """The matrices that a tensor joins."""
        ends = list(accumulate(self._shapes[name][0] for name in names))
        joint = self._read(tensor, (ends[-1], self._shapes[names[0]][1]))
        rows = np.split(np.arange(ends[-1]), ends[:-1])
        return {name: joint.select(part) for name, part in zip(names, rows, strict=True)}

    def _in_halves(self, matrix: Matrix) -> Matrix:
        """Rows of each head from the order a0 b0 a1 b1 ... to a0 a1 ... b0 b1 ..."""
        size = head_size(self.config)
        order = np.arange(matrix.shape[0]).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
        return matrix.select(order)
