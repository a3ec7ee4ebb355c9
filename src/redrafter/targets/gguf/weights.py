"""From a GGUF file's tensors to the weights of the compiled pass."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.kernels.cpu_pass.matrices import Floats, Matrix
from redrafter.kernels.cpu_pass.model import LayerWeights
from redrafter.targets.cpu.families import head_size, is_gemma, layer_kinds
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
VECTORS = {
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "before": "attn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "before_mlp": "ffn_norm.weight",
}
GEMMA_VECTORS = {"after_attention": "post_attention_norm.weight", "after_mlp": "post_ffw_norm.weight"}


class GGUFWeights:
    """The weights of a model in a file, checked against its configuration."""

    def __init__(self, file: GGUFFile, config: Any) -> None:
        self.file, self.config = file, config
        hidden, middle, size = config.hidden_size, config.intermediate_size, head_size(config)
        heads, kv_heads = config.num_attention_heads * size, config.num_key_value_heads * size
        self._shapes = {
            **{"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)},
            **{"gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle)},
        }
        # llama.cpp turns neighbouring pairs of a Llama's queries and keys, transformers turns halves.
        self._pairs = file.metadata["general.architecture"] == "llama"

    def layer(self, index: int) -> LayerWeights:
        matrices = {}
        for name, theirs in MATRICES.items():
            matrix = self._matrix(f"blk.{index}.{theirs}.weight", self._shapes[name])
            matrices[name] = self._in_halves(matrix) if self._pairs and name in "qk" else matrix
        wanted = VECTORS | (GEMMA_VECTORS if is_gemma(self.config) else {})
        vectors = {}
        for name, theirs in wanted.items():
            found = self.file.tensors.get(f"blk.{index}.{theirs}")
            if found is not None:
                vector = read(found).dequantise().reshape(-1)
                vectors[name] = self._in_halves(Floats(vector)).dequantise() if self._turned(name) else vector
            elif name in ("before", "before_mlp") or name in GEMMA_VECTORS:
                raise self.file.corrupt(f"it has no tensor blk.{index}.{theirs}")
        rotation, window = layer_kinds(self.config)[index]
        return LayerWeights(matrices, vectors, rotation, window)

    def _turned(self, name: str) -> bool:
        return self._pairs and name in ("q_bias", "k_bias")

    def embedding(self) -> Matrix:
        return self._matrix("token_embd.weight", (self.config.vocab_size, self.config.hidden_size))

    def head(self) -> Matrix | None:
        """The output embedding; None if the input embedding is used for both."""
        if self.config.tie_word_embeddings:
            return None
        return self._matrix("output.weight", (self.config.vocab_size, self.config.hidden_size))

    def final_norm(self) -> Array:
        if "output_norm.weight" not in self.file.tensors:
            raise self.file.corrupt("it has no tensor output_norm.weight")
        return read(self.file.tensors["output_norm.weight"]).dequantise()

    def rotation_factors(self) -> Tensor | None:
        """What divides the rotary frequencies, in files of Llama 3."""
        found = self.file.tensors.get("rope_freqs.weight")
        return None if found is None else torch.from_numpy(read(found).dequantise().copy())

    def _matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise self.file.corrupt(f"it has no tensor {name}")
        if tensor.shape != shape:
            raise self.file.corrupt(f"the tensor {name} has the shape {tensor.shape}, and its metadata say {shape}")
        return read(tensor)

    def _in_halves(self, matrix: Matrix) -> Matrix:
        """Rows of each head from the order a0 b0 a1 b1 ... to a0 a1 ... b0 b1 ..."""
        size = head_size(self.config)
        order = np.arange(matrix.shape[0]).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
        return matrix.select(order)
