"""Which tokens each layer may look back to, and the masks that say so."""

from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.tree_attention.naive import pack_mask

FULL, SLIDING = "full_attention", "sliding_attention"


class AttentionPlan:
    """Read off a model's config: the kinds of attention layers and the sliding window, if any."""

    def __init__(self, config: Any) -> None:
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            # Without a list per layer, a model with a window applies it everywhere.
            kinds = [SLIDING if window is not None else FULL]
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise UnsupportedTarget(
                    f"{config.model_type}: a layer of the kind {kind!r} keeps no keys for each token, so a "
                    "rejected guess could not be taken back; only full and sliding attention can be verified "
                    "as a tree"
                )
        self.kinds = set(kinds)
        self.window = int(window) if SLIDING in self.kinds and window is not None else None

    def masks(
        self, visible: Tensor, positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """(B, n, S) bool, positions of queries (B, n) and slots (B, S) -> what the model takes.

        One 4D float mask, or one per kind of layer for a model that mixes them.
        """
        full = _additive(visible, dtype)
        if self.window is None:
            return full if len(self.kinds) == 1 else dict.fromkeys(self.kinds, full)
        near = positions[:, :, None] - key_positions[:, None, :] < self.window
        sliding = _additive(visible & near, dtype)
        return sliding if self.kinds == {SLIDING} else {FULL: full, SLIDING: sliding}

    def packed(
        self, lengths: Tensor, depths: Tensor, ancestors: Tensor, places: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The same for the tree kernel: a few words for each node, whatever the length of the cache."""
        full = pack_mask(lengths, depths, ancestors, None, places)
        if self.window is None:
            return full if len(self.kinds) == 1 else dict.fromkeys(self.kinds, full)
        sliding = pack_mask(lengths, depths, ancestors, self.window, places)
        return sliding if self.kinds == {SLIDING} else {FULL: full, SLIDING: sliding}


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]  # (B, 1, n, S)
