"""A model's weights for the compiled pass, and the pass on tensors."""

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.library import FLOAT, LONG, POINTER, fields
from redrafter.kernels.cpu.matrices import Matrix
from redrafter.kernels.cpu.packed import Memory, PackedMatrix, whole
from redrafter.kernels.threads import thread_count

Array = np.ndarray[Any, Any]
SILU, GELU = 0, 1
CACHE_KINDS = (torch.float32, torch.float16, torch.int8)
"""What keys and values are kept in, in the order of model.h."""
SCALE_BYTES = 4
"""Behind each head of an int8 KV cache: its scale."""
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
VECTORS = (
    *("q_bias", "k_bias", "v_bias", "o_bias"),
    *("before", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp"),
)


class _Layer(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(library.Matrix, *MATRICES),
        *fields(POINTER, *VECTORS),
        *fields(LONG, "rotation", "window"),
    ]


class _Model(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        ("layers", ctypes.POINTER(_Layer)),
        *fields(LONG, "layer_count", "hidden", "heads", "kv_heads", "size", "middle", "gate"),
        *fields(library.Matrix, "embedding", "head"),
        ("final_norm", POINTER),
        *fields(FLOAT, "eps", "scale", "embedding_scale", "residual_scale", "logit_scale"),
    ]


class _Pass(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        *[("lines", POINTER), *fields(LONG, "tokens", "columns")],
        *[*fields(POINTER, "cos", "sin"), ("rotation_count", LONG)],
        *[*fields(POINTER, "keys", "values"), *fields(LONG, "row_step", "head_step", "places", "slots")],
        *[("wanted", POINTER), ("wanted_count", LONG), ("hidden", POINTER)],
        *[*fields(POINTER, "kept", "into"), ("kept_count", LONG), ("logits", POINTER)],
        *fields(LONG, "logit_rows", "threads", "cache", "bits"),
    ]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Names are those of MATRICES and VECTORS; a vector may be missing."""

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
    residual_scale: float = 1.0
    """Of what attention and the MLP add to the residual stream."""
    logit_scale: float = 1.0


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of each matrix and vector of a layer."""
    hidden, middle, q, k = sizes.hidden, sizes.middle, sizes.heads * sizes.size, sizes.kv_heads * sizes.size
    return {
        **{"q": (q, hidden), "k": (k, hidden), "v": (k, hidden), "o": (hidden, q)},
        **{"gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle)},
        **{"q_bias": (q,), "k_bias": (k,), "v_bias": (k,), "o_bias": (hidden,)},
        **{"q_norm": (sizes.size,), "k_norm": (sizes.size,)},
        **dict.fromkeys(("before", "after_attention", "before_mlp", "after_mlp"), (hidden,)),
    }


def _check_sizes(sizes: Sizes) -> None:
    numbers = (sizes.hidden, sizes.heads, sizes.kv_heads, sizes.size, sizes.middle)
    if min(numbers) < 1 or sizes.size % 16 or sizes.heads % sizes.kv_heads:
        raise UnsupportedTarget(
            f"the compiled pass cannot run {sizes}: it needs a head size that is a multiple of 16, and a number of "
            "heads that is a multiple of the number of key heads"
        )


def _check_shape(name: str, given: Matrix | Array, wanted: tuple[int, ...]) -> None:
    """The compiled pass reads as many numbers as the sizes say, so every shape must agree with them."""
    if tuple(given.shape) != wanted:
        raise UnsupportedTarget(
            f"the compiled pass needs the shape {wanted} for {name}, and it has {tuple(given.shape)}"
        )


def _check_layer(layer: LayerWeights, sizes: Sizes) -> None:
    shapes = shapes_of(sizes)
    for required in (*MATRICES, "before", "before_mlp"):
        if required not in layer.matrices and required not in layer.vectors:
            raise UnsupportedTarget(f"the compiled pass needs {required} in each layer, and one has none")
    for name, given in (*layer.matrices.items(), *layer.vectors.items()):
        if name not in shapes:
            raise UnsupportedTarget(f"the compiled pass has no place for {name}, which a layer has")
        _check_shape(f"{name} of a layer", given, shapes[name])


class PassModel:
    """A model that one C++ call runs. Weights are packed at once; the given ones may be freed."""

    def __init__(
        self,
        sizes: Sizes,
        layers: Iterable[LayerWeights],
        embedding: Matrix,
        head: Matrix | None,
        final_norm: Array,
    ) -> None:
        """Without a `head` the output embedding is the input embedding. Layers are taken one by one."""
        _check_sizes(sizes)
        vocabulary = (embedding.shape[0], sizes.hidden)
        _check_shape("the embedding", embedding, vocabulary)
        _check_shape("the output embedding", embedding if head is None else head, vocabulary)
        _check_shape("the final norm", final_norm, (sizes.hidden,))
        self.lib, self.sizes = library.loaded(), sizes
        self._memory = Memory()
        self._kept: list[Any] = []  # what the structure points to
        self.embedding = PackedMatrix(embedding, self._memory)
        self.head = self.embedding if head is None else PackedMatrix(head, self._memory)
        packed = [self._layer(layer) for layer in layers]
        self._layers = (_Layer * len(packed))(*packed)
        self.model = _Model(
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

    @property
    def quantised(self) -> bool:
        """Whether any matrix is; floats take activations as they are."""
        return any(kept.quantised for kept in self._matrices())

    def _matrices(self) -> list[PackedMatrix]:
        return [self.embedding, self.head, *(k for k in self._kept if isinstance(k, PackedMatrix))]

    def _vector(self, values: Array | None) -> int | None:
        if values is None:
            return None
        kept = whole(values, np.float32)
        self._kept.append(kept)
        return int(kept.ctypes.data)

    def _layer(self, layer: LayerWeights) -> _Layer:
        _check_layer(layer, self.sizes)
        packed = {name: PackedMatrix(layer.matrices[name], self._memory) for name in MATRICES}
        self._kept += packed.values()
        return _Layer(
            **{name: matrix.fields for name, matrix in packed.items()},
            **{name: self._vector(layer.vectors.get(name)) for name in VECTORS},
            rotation=layer.rotation,
            window=layer.window,
        )

    def run(
        self,
        lines: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        rotations: Sequence[tuple[Tensor, Tensor]],
        *,
        wanted: Sequence[int] = (),
        kept: Tensor | None = None,
        real: Tensor | None = None,
        known: tuple[Any, Any] | None = None,
        bits: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Lines (T, C) of a flat pass -> logits (T or len(kept), V), hidden states (T, wanted · hidden).

        The lines' format is in tree_attention/naive.py, with any number of newest keys; none is padding. cache: keys
        and values (P, K, S, D) of each layer, of a dtype of CACHE_KINDS, all with the same strides; in int8
        (P, K, S, D + SCALE_BYTES), with an fp32 scale behind each head. rotations: cosines and sines (positions, head
        size / 2) of each kind of layer; other threads may use others at the same time. wanted: hidden states, as
        transformers numbers them. kept: lines whose logits are wanted. real: (M,) bool, which of M logits they become;
        the others are 0. known: what `cache_pointers` found for this cache before. bits: of the activations that
        quantised matrices are multiplied with: 8, 16, or 0 for fp32.
        """
        lines, count = lines.contiguous(), lines.shape[0]
        kept = _every(count) if kept is None else kept.contiguous()
        into = _every(kept.shape[0]) if real is None else torch.from_numpy(np.flatnonzero(real.numpy()))
        assert into.shape == kept.shape
        states = _numbers(tuple(i % (self.layer_count + 1) for i in wanted))
        hidden = torch.empty(count, len(states) * self.sizes.hidden)
        logits = torch.empty((kept if real is None else real).shape[0], self.head.shape[0])
        if real is not None:
            logits.numpy()[~real.numpy()] = 0
        first = cache[0][0]
        cos, sin = (_pointers([pair[i] for pair in rotations]) for i in (0, 1))
        keys, values = (_pointers([pair[i] for pair in cache]) for i in (0, 1)) if known is None else known
        call = _Pass(
            lines=lines.data_ptr(),
            tokens=count,
            columns=lines.shape[1],
            cos=ctypes.addressof(cos),
            sin=ctypes.addressof(sin),
            rotation_count=min(len(pair[0]) for pair in rotations),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            row_step=first.stride(0),
            head_step=first.stride(1),
            places=first.shape[0],
            slots=first.shape[2],
            wanted=states.data_ptr(),
            wanted_count=len(states),
            hidden=hidden.data_ptr(),
            kept=kept.data_ptr(),
            into=into.data_ptr(),
            kept_count=kept.shape[0],
            logits=logits.data_ptr(),
            logit_rows=logits.shape[0],
            threads=thread_count(),
            cache=CACHE_KINDS.index(first.dtype),
            bits=bits,
        )
        library.require_done(self.lib.run_pass(ctypes.byref(self.model), ctypes.byref(call)), self.embedding.shape[0])
        return logits, hidden


def cache_pointers(cache: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    """Where the keys and values of each layer are, for passes over tensors that never move."""
    return _pointers([keys for keys, _ in cache]), _pointers([values for _, values in cache])


@functools.lru_cache(maxsize=1024)
def _every(count: int) -> Tensor:
    return torch.arange(count)


@functools.lru_cache(maxsize=64)
def _numbers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
