"""A target that verifies through the tree kernel: keys are read once, no mask as long as the cache is made.

The kernel stands in for the model's own attention while a step is compiled or recorded, and the model is as before
afterwards. It finds the cache by itself (`serving`), so a compiler that sees the model's code sees no cache and
cannot copy it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree
from redrafter.errors import UnsupportedTarget
from redrafter.kernels import runs_triton
from redrafter.kernels.tree_attention import naive
from redrafter.targets.target import Target

NAME = "redrafter_tree"
OTHER_MATHS = ("softcap", "s_aux", "head_mask")
"""What a model may say to attention that the kernel does not do."""
PIECE = 512
"""Prompt tokens per pass, of all rows together."""
_serving: list[KVCache] = []


@torch.library.custom_op("redrafter::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, layer: int, scaling: float) -> Tensor:
    keys, values = _serving[-1].layers[layer]
    if runs_triton(query.device):
        from redrafter.kernels.tree_attention import triton

        return triton.attend(query, key, value, keys, values, packed, scaling)
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


class _PassingLayer(CacheLayerMixin):
    """Hands keys and values on as they are: the kernel puts them into the cache."""

    is_compileable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 1  # positions and masks are always given: "something is here" is all a model needs

    def get_max_length(self) -> int:
        return -1


class TreeTarget:
    """`core.step`'s target while `serving` is in force. With `compiles`, its pass is compiled, once for any length."""

    def __init__(self, target: Target, compiles: bool = False) -> None:
        self.target = target
        self.compiles = compiles
        self.pass_ = torch.compile(self.forward, dynamic=True, fullgraph=True) if compiles else self.forward

    @torch.compiler.disable  # a compiled step calls it and does not look inside
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As Target.verify; `cache` is the one that is served."""
        return self.pass_(tree.tokens, tree.depths, tree.mask, lengths, layers)

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
            logits, states = self.pass_(tokens[:, first:stop], depths, chain, at, layers)
            hidden.append(states[:, start - first :])
            for row, n in enumerate(lengths):
                if start < n <= stop:
                    last[row] = logits[row, n - 1 - first]
        return torch.stack([last[row] for row in range(batch)]), torch.cat(hidden, dim=1)

    def forward(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, lengths: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Tensors in, tensors out: what is compiled."""
        target = self.target
        masks = target.attention.packed(lengths, depths, ancestors)
        passing = Cache(layers=[_PassingLayer() for _ in range(target.layer_count)])
        return target.run(tokens, lengths[:, None] + depths, masks, passing, layers)


@contextlib.contextmanager
def serving(target: Target, cache: KVCache) -> Iterator[None]:
    """The kernel serves this model from this cache for a while."""
    before = target.config._attn_implementation
    target.model.set_attn_implementation(NAME)
    _serving.append(cache)
    try:
        yield
    finally:
        _serving.pop()
        target.model.set_attn_implementation(before)
