"""Grouped-query attention that reads each key once: query heads that share keys become queries of one head.

transformers' `sdpa` copies keys and values once per query head whenever a mask is given. For a batch that decodes
token by token, the copies take most of the time. The result is the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from redrafter.targets.attention import attention_implementation
from redrafter.targets.target import Target

NAME = "redrafter_grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """(B, G·K, n, D) queries on (B, K, S, D) keys and values -> (B, n, G·K, D)."""
    batch, heads, n, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or groups == 1:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    mask = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # (B, 1, G·n, S)
    queries = query.reshape(batch, key.shape[1], groups * n, size)
    out = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)


@contextlib.contextmanager
def use_grouped_attention(target: Target) -> Iterator[None]:
    """Run a target's model with grouped attention if its own is `sdpa`; another implementation stays."""
    own = getattr(target.config, "_attn_implementation", None)
    if own != "sdpa" or not hasattr(target.model, "set_attn_implementation"):
        yield
        return
    with attention_implementation(target.model, NAME):
        yield
