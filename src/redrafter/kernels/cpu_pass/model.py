"""A model's weights for the compiled pass, and the pass on tensors."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.kernels.cpu_pass import library
from redrafter.kernels.cpu_pass.matrices import Matrix
from redrafter.kernels.cpu_pass.packed import Memory, PackedMatrix

Array = np.ndarray[Any, Any]
SILU, GELU = 0, 1


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Names are those of library.MATRICES and library.VECTORS; a vector may be missing."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Array]
    rotation: int = 0
    """Which table of rotations the layer uses."""
    window: int = 0
    """Most positions that a token sees, its own included; 0: all."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a model."""

    hidden: int
    heads: int
    kv_heads: int
    size: int
    """Of a head."""
    middle: int
    gate: int
    """SILU or GELU."""
    eps: float
    scale: float
    """Of queries times keys."""
    embedding_scale: float = 1.0


class PassModel:
    """A model that one C++ call runs. Weights are packed at once; the given ones may be freed."""

    def __init__(
        self,
        sizes: Sizes,
        layers: Iterable[LayerWeights],
        embedding: Matrix,
        head: Matrix | None,
        final_norm: Array,
        lib: ctypes.CDLL | None = None,
    ) -> None:
        """Without a `head` the output embedding is the input embedding. Layers are taken one by one."""
        lib = lib or library.library()
        assert lib is not None
        assert sizes.size % 16 == 0
        self.lib, self.sizes = lib, sizes
        self._memory = Memory()
        self._kept: list[Any] = []  # what the structure points to
        self.embedding = PackedMatrix(embedding, self._memory, lib)
        self.head = self.embedding if head is None else PackedMatrix(head, self._memory, lib)
        self.rotations: list[int] = []
        packed = [self._layer(layer) for layer in layers]
        self._layers = (library.Layer * len(packed))(*packed)
        self.model = library.Model(
            layers=self._layers,
            layer_count=len(packed),
            embedding=self.embedding.fields,
            head=self.head.fields,
            final_norm=self._vector(final_norm),
            **vars(sizes),
        )

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(len(kept.data) for kept in {id(k): k for k in self._matrices()}.values())

    def _matrices(self) -> list[PackedMatrix]:
        return [self.embedding, self.head, *(k for k in self._kept if isinstance(k, PackedMatrix))]

    def _vector(self, values: Array | None) -> int | None:
        if values is None:
            return None
        kept = np.ascontiguousarray(values, dtype=np.float32)
        self._kept.append(kept)
        return int(kept.ctypes.data)

    def _layer(self, layer: LayerWeights) -> library.Layer:
        self.rotations.append(layer.rotation)
        packed = {name: PackedMatrix(layer.matrices[name], self._memory, self.lib) for name in library.MATRICES}
        self._kept += packed.values()
        return library.Layer(
            **{name: matrix.fields for name, matrix in packed.items()},
            **{name: self._vector(layer.vectors.get(name)) for name in library.VECTORS},
            window=layer.window,
        )

    def set_rotations(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Cosines and sines (positions, head size / 2) in fp32, one pair for each kind of layer."""
        self._tables = tables
        for layer, kind in zip(self._layers, self.rotations, strict=True):
            layer.cos, layer.sin = (table.data_ptr() for table in tables[kind])

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        *,
        visible: Tensor | None = None,
        key_positions: Tensor | None = None,
        wanted: Sequence[int] = (),
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens, positions and slots (B, n) -> logits (B, n or len(keep), V), hidden states (B, n, wanted · hidden).

        cache: keys and values (B, K, S, D) of each layer, all with the same strides. visible: (B, n, S) bool, which
        slots each token sees; without it, all up to its own. key_positions: (B, S), for layers with a window. wanted:
        hidden states, as transformers numbers them. keep: columns whose logits are wanted.
        """
        batch, n = tokens.shape
        tokens, positions, slots = (x.contiguous() for x in (tokens, positions, slots))
        columns = torch.arange(n) if keep is None else keep
        kept = (torch.arange(batch)[:, None] * n + columns).contiguous()
        states = torch.tensor([i % (self.layer_count + 1) for i in wanted], dtype=torch.long)
        hidden = torch.empty(batch, n, len(states) * self.sizes.hidden)
        logits = torch.empty(*kept.shape, self.head.shape[0])
        first = cache[0][0]
        pointers = ctypes.c_void_p * len(cache)
        if visible is not None:
            visible = visible if visible.stride(2) == 1 else visible.contiguous()
        where = None if key_positions is None else key_positions.contiguous()
        keys, values = (pointers(*(pair[i].data_ptr() for pair in cache)) for i in (0, 1))
        call = library.Pass(
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            visible=None if visible is None else visible.data_ptr(),
            visible_row=0 if visible is None else visible.stride(0),
            visible_step=0 if visible is None else visible.stride(1),
            key_positions=None if where is None else where.data_ptr(),
            extent=0 if visible is None else visible.shape[2],
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            row_step=first.stride(0),
            head_step=first.stride(1),
            wanted=states.data_ptr(),
            wanted_count=len(states),
            hidden=hidden.data_ptr(),
            kept=kept.data_ptr(),
            kept_count=kept.numel(),
            logits=logits.data_ptr(),
            rows=batch,
            nodes=n,
            threads=torch.get_num_threads(),
        )
        self.lib.run_pass(ctypes.byref(self.model), ctypes.byref(call))
        return logits, hidden
