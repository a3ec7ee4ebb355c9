"""Helpers for the state of a batch: a dataclass whose tensors have rows as their first axis."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from redrafter.core.cache import KVCache

T = TypeVar("T")


def keep_rows(state: T, rows: Tensor | slice) -> T:
    """The same dataclass with only these rows of its tensors, also in dataclasses inside it; other fields stay.

    A KV cache drops its other rows in place. A slice needs no copy to the device, and a KV cache takes none.
    """
    kept: dict[str, Any] = {}
    for field in fields(state):  # type: ignore[arg-type]
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            kept[field.name] = value[rows]
        elif isinstance(value, KVCache):
            assert isinstance(rows, Tensor)
            value.keep(rows)
        elif is_dataclass(value) and not isinstance(value, type):
            kept[field.name] = keep_rows(value, rows)
    return replace(state, **kept)  # type: ignore[type-var]


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1) in the dtype of `like`, to broadcast over (B, n, V)."""
    return values[:, None, None].to(like.dtype)
