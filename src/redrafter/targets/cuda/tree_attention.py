"""The tree kernel in a model's place for attention, and the cache it serves the model from.

The kernel finds the cache by itself, so a compiler that sees the model's code sees no cache and cannot copy it.
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
from redrafter.kernels.tree_attention.naive import Rotary
from redrafter.targets.target import Target

NAME = "redrafter_tree"
OTHER_MATHS = ("softcap", "s_aux", "head_mask")
"""What a model may say to attention that the kernel does not do."""
_serving: list[KVCache] = []
_arrivals: WeakKeyDictionary[KVCache, dict[torch.device, Tensor]] = WeakKeyDictionary()
"""The kernel's counters: a cache's own, since one cache is read by one pass at a time."""


@contextlib.contextmanager
def served(target: Target, cache: KVCache) -> Iterator[None]:
    """The kernel serves a target's model from this cache for a while."""
    model, before = target.model, target.config._attn_implementation
    model.set_attn_implementation(NAME)
    _serving.append(cache)
    try:
        yield
    finally:
        _serving.pop()
        model.set_attn_implementation(before)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    layer: int,
    scaling: float,
    turn: Rotary | None = None,
) -> Tensor:
    """(B, heads, n, D) queries of n nodes on the served cache and their own keys -> (B, n, heads, D)."""
    cache = _serving[-1]
    keys, values = cache.layers[layer]
    counters = _arrivals.setdefault(cache, {})
    return kernel.attend(query, key, value, keys, values, packed, scaling, turn, counters)


@torch.library.custom_op("redrafter::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    return attend(query, key, value, packed, layer, scaling)


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
    """What transformers calls: (B, heads, n, D) queries of n nodes -> (B, n, heads, D)."""
    for name in OTHER_MATHS:
        if kwargs.get(name) is not None:
            raise UnsupportedTarget(f"the tree kernel knows no {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, attention_mask, module.layer_idx, scale), None


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)


class PassingCache(Cache):
    """Hands keys and values on as they are: the kernel puts them into the cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1  # positions and masks are always given: "something is here" is all a model needs
