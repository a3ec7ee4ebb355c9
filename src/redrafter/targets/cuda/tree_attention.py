"""The tree attention kernel as an attention implementation of transformers.

The kernel finds the KV cache through a module variable. A compiler that traces the model therefore never sees the
cache and cannot copy it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from redrafter.core.cache import KVCache
from redrafter.errors import UnsupportedTarget
from redrafter.kernels import tree_attention as kernel
from redrafter.kernels.tree_attention.naive import write
from redrafter.targets.attention import attention_implementation
from redrafter.targets.target import Target

NAME = "redrafter_tree"
OTHER_MATHS = ("softcap", "s_aux", "head_mask")
"""Arguments of an attention function that the kernel does not support."""
_active: list[KVCache] = []
"""The KV caches of the `use_tree_attention` blocks under way, innermost last."""
_arrivals: WeakKeyDictionary[KVCache, dict[torch.device, Tensor]] = WeakKeyDictionary()
"""The kernel's counters, a set for each cache: one pass at a time reads a cache."""


@contextlib.contextmanager
def use_tree_attention(target: Target, cache: KVCache) -> Iterator[None]:
    """Run a target's model with the kernel as its attention, on this KV cache."""
    with attention_implementation(target.model, NAME):
        _active.append(cache)
        try:
            yield
        finally:
            _active.pop()


def active_layer(layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer of the active cache."""
    return _active[-1].layers[layer]


def attend(query: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    """(B, n, heads, D) queries of n nodes on the active cache, which holds the nodes' keys -> (B, n, heads, D)."""
    cache = _active[-1]
    keys, values = cache.layers[layer]
    counters = _arrivals.setdefault(cache, {})
    return kernel.attend(query, keys, values, packed, scaling, counters)


@torch.library.custom_op("redrafter::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    write(key, value, *active_layer(layer), packed)
    return attend(query.transpose(1, 2).contiguous(), packed, layer, scaling)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    batch, heads, n, size = query.shape
    return query.new_empty(batch, n, heads, size)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers: (B, heads, n, D) queries of n nodes -> (B, n, heads, D)."""
    for name in OTHER_MATHS:
        if kwargs.get(name) is not None:
            raise UnsupportedTarget(f"the tree kernel does not support {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, attention_mask, module.layer_idx, scale), None


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)


class PassThroughCache(Cache):
    """Returns keys and values as they come; the kernel writes them to the KV cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1  # the self-check refuses a model that derives anything from this number
