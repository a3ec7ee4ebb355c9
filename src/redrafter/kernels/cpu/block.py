"""A whole decoder layer as one C++ call."""

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from redrafter.kernels.cpu.library import FLOAT, LONG, POINTER, fields, loaded, require_done
from redrafter.kernels.threads import thread_count

MATRICES = ("q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm", "k_norm", "o", "o_bias")
POINTERS = ("before", *MATRICES, "after", "gate", "up", "down")
FLOATS = ("before_eps", "before_offset", "head_eps", "head_offset", "after_eps", "after_offset", "scale")
LONGS = ("hidden", "heads", "kv_heads", "size", "middle")


class _Block(ctypes.Structure):
    """As in layer.cpp."""

    _fields_: ClassVar[list[Any]] = [*fields(POINTER, *POINTERS), *fields(FLOAT, *FLOATS), *fields(LONG, *LONGS)]


class Block:
    """A layer's weights as pointers for the compiled function. They are valid while the weights stay in place."""

    def __init__(self, weights: dict[str, Tensor | None], numbers: dict[str, float], size: int) -> None:
        """`weights` and `numbers` by the names above; `size` is a head's."""
        q, k, gate = (weights[name] for name in ("q", "k", "gate"))
        assert q is not None
        assert k is not None
        assert gate is not None
        self._fields = _Block(
            **{name: None if w is None else w.data_ptr() for name, w in weights.items()},
            **numbers,
            hidden=q.shape[1],
            heads=len(q) // size,
            kv_heads=len(k) // size,
            size=size,
            middle=len(gate),
        )
        self._at = ctypes.addressof(self._fields)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """x (B, n, hidden), cos and sin (B, n, D), slots (B, n), cache (B, K, S, D), mask (B, 1, n, seen)."""
        y = torch.empty_like(x)
        done = loaded().block(
            *(self._at, x.data_ptr(), y.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), slots.data_ptr()),
            *(keys.data_ptr(), values.data_ptr(), keys.shape[2], keys.stride(0), keys.stride(1)),
            *(mask.data_ptr(), mask.stride(0), mask.stride(2), mask.shape[3]),
            *(x.shape[0], x.shape[1], thread_count()),
        )
        require_done(done)
        return y
