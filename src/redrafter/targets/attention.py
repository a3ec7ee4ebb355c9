"""Which tokens each layer may attend to, and the masks for it; switching a model's attention implementation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.tree_attention.naive import INDEX, WINDOW

FULL, SLIDING, CHUNKED, INDEXED = "full_attention", "sliding_attention", "chunked_attention", "indexed_attention"
"""Kinds of layers in transformers' words. An indexed layer is shown all keys, and attends to those that it selects."""
ATTENTION = (FULL, SLIDING, CHUNKED, INDEXED)
RECURRENT = ("linear_attention", "conv", "hybrid")
"""Kinds of layers that keep a recurrent state (`recurrence.py`); a hybrid layer has attention too."""
STATELESS = ("moe", "mlp")
KEPT_INSTEAD = {
    "compressed_sparse_attention": "keys that stand for several tokens",
    "heavily_compressed_attention": "keys that stand for several tokens",
}
"""What layers of other kinds keep instead of keys for each token."""


def recurrent_kind(config: Any) -> str | None:
    """The kind of a model's layers that keep a recurrent state, None if it has no such layers."""
    kinds = getattr(config, "layer_types", None) or ()
    return next((kind for kind in kinds if kind in RECURRENT), None)


class AttentionPlan:
    """The kinds of attention layers in a model's config, and the size of its sliding window and of its chunks."""

    def __init__(self, config: Any) -> None:
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            # Without a list per layer, a model with a window or chunks has them everywhere.
            kinds = [SLIDING if window is not None else CHUNKED if chunk is not None else FULL]
        for kind in kinds:
            if kind not in (*ATTENTION, *RECURRENT, *STATELESS):
                raise UnsupportedTarget(
                    f"{config.model_type}: a layer of the kind {kind!r} keeps no keys for each token but "
                    f"{KEPT_INSTEAD.get(kind, 'something else')}, which each node of a tree would need for itself; use "
                    "a model with full, sliding, chunked or indexed attention or recurrent layers"
                )
        self.recurrent = recurrent_kind(config) is not None
        self.kinds = {kind for kind in kinds if kind in ATTENTION} or {FULL}
        self.window = int(window) if SLIDING in self.kinds and window is not None else None
        self.chunk = int(chunk) if CHUNKED in self.kinds and chunk is not None else None

    def masks(
        self, visible: Tensor, positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """Visible slots (B, n, S), positions of queries (B, n) and slots (B, S) -> the model's `attention_mask`.

        One 4D float mask, or one per kind of layer for a model that mixes them.
        """
        full = _additive(visible, dtype)
        masks = dict.fromkeys(self.kinds, full)
        if self.window is not None:
            near = positions[:, :, None] - key_positions[:, None, :] < self.window
            masks[SLIDING] = _additive(visible & near, dtype)
        if self.chunk is not None:
            beside = positions[:, :, None] // self.chunk == key_positions[:, None, :] // self.chunk
            masks[CHUNKED] = _additive(visible & beside, dtype)
        return self._as_model_takes(masks)

    def lines(self, lines: Tensor) -> Tensor | dict[str, Tensor]:
        """The lines (T, ...) of a flat pass as the model's `attention_mask`, one for each kind of layer that it mixes.

        The masks have four axes because transformers passes such a mask to attention unchanged.
        """
        full = lines[None, None]
        masks = dict.fromkeys(self.kinds, full)
        if self.window is not None:
            masks[SLIDING] = full.clone()
            masks[SLIDING][..., WINDOW] = self.window
        if self.chunk is not None:  # a token's window reaches back to the beginning of its chunk
            masks[CHUNKED] = full.clone()
            masks[CHUNKED][..., WINDOW] = full[..., INDEX] % self.chunk + 1
        return self._as_model_takes(masks)

    def _as_model_takes(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        return masks if len(masks) > 1 else masks.popitem()[1]


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
