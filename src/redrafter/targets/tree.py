"""A target that verifies through the tree kernel: keys are read once, no mask as long as the cache is made.

The kernel stands in for the model's own attention, and joint products for layers that read the same, while a step is
compiled or recorded; the model is as before afterwards. The kernel finds the cache by itself (`serving`), so a compiler
that sees the model's code sees no cache and cannot copy it.
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
from redrafter.core.tree import Tree
from redrafter.errors import UnsupportedTarget
from redrafter.kernels import runs_triton
from redrafter.kernels.tree_attention import naive
from redrafter.targets.joined import standing, stands
from redrafter.targets.regions import Regions
from redrafter.targets.target import Target

NAME = "redrafter_tree"
OTHER_MATHS = ("softcap", "s_aux", "head_mask")
"""What a model may say to attention that the kernel does not do."""
PIECE = 512
"""Prompt tokens per pass, of all rows together."""
_serving: list[KVCache] = []
_arrivals: WeakKeyDictionary[KVCache, dict[torch.device, Tensor]] = WeakKeyDictionary()
"""The kernel's counters: a cache's own, since one cache is read by one pass at a time."""


@torch.library.custom_op("redrafter::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    cache = _serving[-1]
    keys, values = cache.layers[layer]
    if runs_triton(query.device):
        from redrafter.kernels.tree_attention import triton

        by_device = _arrivals.setdefault(cache, {})
        if query.device not in by_device:
            by_device[query.device] = torch.zeros(triton.PROGRAMS, dtype=torch.int32, device=query.device)
        return triton.attend(query, key, value, keys, values, packed, by_device[query.device], scaling)
    return naive.attend(query, key, value, keys, values, packed, scaling).contiguous()


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


class _PassingCache(Cache):
    """Hands keys and values on as they are: the kernel puts them into the cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1  # positions and masks are always given: "something is here" is all a model needs


class TreeTarget:
    """`core.step`'s target while `serving` is in force. With `compiles`, its layers are compiled, for any length."""

    def __init__(self, target: Target, compiles: bool = False) -> None:
        self.target = target
        self.compiles = compiles
        self.stands = stands(target.model)
        if compiles:  # the first call that asks for hidden states hangs transformers' hooks: before regions hide them
            target.states(torch.zeros(1, 1, dtype=torch.long, device=target.device), (-1,))
        packed = target.attention.packed
        self.packed = torch.compile(packed, dynamic=True, fullgraph=True) if compiles else packed
        self.regions = Regions(target.model, target.layer_count) if compiles else None

    @contextlib.contextmanager
    def serving(self, cache: KVCache) -> Iterator[None]:
        """The kernel serves the model from this cache for a while."""
        model, before = self.target.model, self.target.config._attn_implementation
        model.set_attn_implementation(NAME)
        _serving.append(cache)
        try:
            with standing(self.stands), self.regions.standing() if self.regions else contextlib.nullcontext():
                yield
        finally:
            _serving.pop()
            model.set_attn_implementation(before)

    @torch.compiler.disable  # a compiled step calls it and does not look inside
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As Target.verify; `cache` is the one that is served."""
        return self.forward(tree.tokens, tree.depths, tree.mask, lengths, layers)

    def prefill(
        self, tokens: Tensor, lengths: list[int], cache: KVCache, layers: tuple[int, ...], begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        """As Target.prefill: a piece of a prompt is a tree without branches."""
        batch, total = tokens.shape
        piece = max(16, PIECE // batch)
        last: dict[int, Tensor] = {}
        hidden: list[Tensor] = []
        for start in range(begin, total, piece):
            stop = min(start + piece, total)
            first = max(min(start, stop - 2), 0)  # a piece of one would be compiled for itself: read one again
            depths = torch.arange(stop - first, device=tokens.device).expand(batch, -1)
            chain = depths[:, :, None] >= depths[:, None, :]
            at = torch.full((batch,), first, device=tokens.device)
            logits, states = self.forward(tokens[:, first:stop], depths, chain, at, layers)
            hidden.append(states[:, start - first :])
            for row, n in enumerate(lengths):
                if start < n <= stop:
                    last[row] = logits[row, n - 1 - first]
        return torch.stack([last[row] for row in range(batch)]), torch.cat(hidden, dim=1)

    def forward(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, lengths: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        target = self.target
        masks = self.packed(lengths, depths, ancestors)
        return target.run(tokens, lengths[:, None] + depths, masks, _PassingCache(), layers)
