"""Which tokens each layer may attend to, and the masks for it; switching a model's attention implementation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.tree_attention.naive import WINDOW

FULL, SLIDING = "full_attention", "sliding_attention"
RECURRENT = ("linear_attention", "conv", "hybrid")
"""Kinds of layers that keep a recurrent state (`recurrence.py`); a hybrid layer has attention too."""
STATELESS = ("moe", "mlp")


class AttentionPlan:
    """The kinds of attention layers in a model's config, and the sliding window if there is one."""

    def __init__(self, config: Any) -> None:
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            # Without a list per layer, a model with a window applies it everywhere.
            kinds = [SLIDING if window is not None else FULL]
        for kind in kinds:
            if kind not in (FULL, SLIDING, *RECURRENT, *STATELESS):
                raise UnsupportedTarget(
                    f"{config.model_type}: a layer of the kind {kind!r} shows its keys in another way than full and "
                    "sliding attention, so a tree cannot be verified; use a model with full and sliding attention or "
                    "recurrent layers"
                )
        self.recurrent = not set(kinds).isdisjoint(RECURRENT)
        self.kinds = {kind for kind in kinds if kind in (FULL, SLIDING)} or {FULL}
        self.window = int(window) if SLIDING in self.kinds and window is not None else None

    def masks(
        self, visible: Tensor, positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """Visible slots (B, n, S), positions of queries (B, n) and slots (B, S) -> the model's `attention_mask`.

        One 4D float mask, or one per kind of layer for a model that mixes them.
        """
        full = _additive(visible, dtype)
        if self.window is None:
            return full if len(self.kinds) == 1 else dict.fromkeys(self.kinds, full)
        near = positions[:, :, None] - key_positions[:, None, :] < self.window
        sliding = _additive(visible & near, dtype)
        return sliding if self.kinds == {SLIDING} else {FULL: full, SLIDING: sliding}

    def lines(self, lines: Tensor) -> Tensor | dict[str, Tensor]:
        """The lines (T, ...) of a flat pass as the model's `attention_mask`, one for each kind of layer that it mixes.

        The masks have four axes because transformers passes such a mask to attention unchanged.
        """
        full = lines[None, None]
        if self.window is None:
            return full if len(self.kinds) == 1 else dict.fromkeys(self.kinds, full)
        sliding = full.clone()
        sliding[..., WINDOW] = self.window
        return sliding if self.kinds == {SLIDING} else {FULL: full, SLIDING: sliding}


def attention_implementations(model: Any) -> dict[str, str]:
    """The attention implementation of a model and of its sub-models, as `set_attn_implementation` takes them."""
    config = model.config
    parts = {name: getattr(config, name) for name in getattr(config, "sub_configs", {})}
    parts = {name: part for name, part in parts.items() if hasattr(part, "_attn_implementation")}
    return {name: part._attn_implementation for name, part in {"": config, **parts}.items()}


@contextlib.contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Run a model with another attention implementation, and restore its own at the end."""
    before = attention_implementations(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]  # (B, 1, n, S)
