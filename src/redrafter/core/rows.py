"""Helpers for the state of a batch: a dataclass whose tensors have rows as their first axis."""

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def keep_rows(state: T, rows: Tensor) -> T:
    """The same dataclass with only these rows of its tensors; other fields stay."""
    fields: dict[str, Any] = vars(state)
    return replace(state, **{k: v[rows] for k, v in fields.items() if isinstance(v, Tensor)})  # type: ignore[type-var]


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1) in the dtype of `like`, to broadcast over (B, n, V)."""
    return values[:, None, None].to(like.dtype)
