"""The tree attention kernel as an attention implementation of transformers.

The kernel finds the KV cache and the tiles of a pass through a module variable. A compiler that traces the model
therefore never sees the cache and cannot copy it.
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
from redrafter.core.flat import Flat
from redrafter.errors import UnsupportedTarget
from redrafter.kernels import tree_attention as kernel
from redrafter.kernels.tree_attention.naive import write
from redrafter.targets.attention import attention_implementation
from redrafter.targets.target import Target

NAME = "redrafter_tree"
OTHER_MATHS = ("softcap", "s_aux", "head_mask")
"""Arguments of an attention function that the kernel does not support."""
_arrivals: WeakKeyDictionary[KVCache, dict[torch.device, Tensor]] = WeakKeyDictionary()
"""The kernel's counters, a set for each cache: one pass at a time reads a cache."""


class ActivePass:
    """The KV cache that the model's attention works on, and the tiles of the pass under way."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.counters = _arrivals.setdefault(cache, {})
        self.flat: Flat | None = None
        self.tiles: dict[tuple[Any, ...], kernel.Tiles] = {}

    def begin(self, flat: Flat, heads: int) -> None:
        """A pass over these tokens begins. The tiles of all kinds of layers are made now, long before they are read."""
        self.flat, self.tiles = flat, {}
        for keys, _ in self.cache.layers.values():
            self.tiles_for(heads, keys)

    def tiles_for(self, heads: int, keys: Tensor) -> kernel.Tiles:
        """The tiles of a layer with this many query heads and these keys (P, K, S, D)."""
        assert self.flat is not None, "no pass has begun"
        kind = (heads, *keys.shape[1:], keys.dtype, keys.device)
        if kind not in self.tiles:
            _, kv_heads, slots, size = keys.shape
            runs = self.flat.runs.to(keys.device)
            self.tiles[kind] = kernel.tiles(runs, len(self.flat.lines), heads, kv_heads, size, slots, keys.dtype)
        return self.tiles[kind]

    def attend(self, query: Tensor, lines: Tensor, layer: int, scaling: float) -> Tensor:
        """Queries (T, H, D) of the pass's tokens, whose keys the cache holds -> (T, H, D)."""
        keys, values = self.cache.layers[layer]
        tiles = self.tiles_for(query.shape[1], keys)
        return kernel.attend(query, keys, values, lines, tiles, scaling, self.counters)


_active: list[ActivePass] = []
"""One for each `use_tree_attention` block under way, innermost last."""


def active() -> ActivePass:
    return _active[-1]


@contextlib.contextmanager
def use_tree_attention(target: Target, cache: KVCache) -> Iterator[None]:
    """Run a target's model with the kernel as its attention, on this KV cache."""
    with attention_implementation(target.model, NAME):
        _active.append(ActivePass(cache))
        try:
            yield
        finally:
            _active.pop()


@torch.library.custom_op("redrafter::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, lines: Tensor, layer: int, scaling: float) -> Tensor:
    keys, values = active().cache.layers[layer]
    write(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, lines[0, 0])
    return active().attend(query[0].transpose(0, 1).contiguous(), lines[0, 0], layer, scaling)[None]


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, lines: Tensor, layer: int, scaling: float) -> Tensor:
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
    """The attention function for transformers: (1, heads, T, D) queries of T tokens -> (1, T, heads, D)."""
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
