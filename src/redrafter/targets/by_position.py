"""Queries that grow with their position, where a model counts it from the length of its cache (Llama 4).

Rows of a batch and nodes of a tree differ in position, and a cache has one length. So while redrafter runs such a
model, its attention does not scale; what makes the queries does, by the positions of the pass. The self-check compares
both.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def scaling_attentions(model: nn.Module) -> list[Any]:
    """The attention modules of a model that scale their queries so: those without a rotary embedding."""
    return [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False)
        and not getattr(module, "use_rope", True)
        and all(hasattr(module, name) for name in ("q_proj", "floor_scale", "attn_scale"))
    ]


@contextlib.contextmanager
def scaled(attentions: list[Any], positions: Tensor) -> Iterator[None]:
    """Run a model whose tokens are at these positions (B, n)."""
    with contextlib.ExitStack() as undo:
        for attention in attentions:
            tuning, attention.attn_temperature_tuning = attention.attn_temperature_tuning, False
            undo.callback(setattr, attention, "attn_temperature_tuning", tuning)
            hook = attention.q_proj.register_forward_hook(partial(_scale, attention, positions))
            undo.callback(hook.remove)
        yield


def _scale(attention: Any, positions: Tensor, _: Any, __: Any, queries: Tensor) -> Any:
    """Scale (B, n, heads · D) in the attention's own order of operations."""
    steps = torch.floor((positions.to(queries.device).float() + 1.0) / attention.floor_scale)
    factors = torch.log1p(steps) * attention.attn_scale + 1.0
    return (queries * factors[..., None]).to(queries.dtype)
