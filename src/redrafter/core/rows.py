"""Helpers for the state of a batch: a dataclass whose tensors have rows as their first axis."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from redrafter.core.cache import KVCache

T = TypeVar("T")


def map_tensors(
    state: T, change: Callable[[Tensor], Tensor], of_cache: Callable[[KVCache], KVCache] | None = None
) -> T:
    """The same state with each tensor changed: a tensor, a KV cache, or a dataclass that holds them; all else stays.

    `of_cache` changes a KV cache instead.
    """
    changed: Any = state
    if isinstance(state, Tensor):
        changed = change(state)
    elif isinstance(state, KVCache):
        if of_cache is not None:
            return of_cache(state)  # type: ignore[return-value]
        changed = copy.copy(state)
        changed.layers = {layer: (change(keys), change(values)) for layer, (keys, values) in state.layers.items()}
    elif is_dataclass(state) and not isinstance(state, type):
        each = {f.name: map_tensors(getattr(state, f.name), change, of_cache) for f in fields(state)}
        changed = replace(state, **each)
    return changed  # type: ignore[no-any-return]


def keep_rows(state: T, rows: Tensor | slice) -> T:
    """The same state with only these rows of its tensors. A KV cache drops its other rows in place, by index only."""

    def keep(cache: KVCache) -> KVCache:
        assert isinstance(rows, Tensor)
        cache.keep(rows)
        return cache

    return map_tensors(state, lambda x: x[rows], keep)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1) in the dtype of `like`, to broadcast over (B, n, V)."""
    return values[:, None, None].to(like.dtype)
