"""Medusa's networks (arXiv 2401.10774): for each depth one that reads the context alone, all guessing at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.config import MedusaConfig

RANKS = 16
"""How many of each network's best tokens its accuracies are counted for."""


class MedusaNet(nn.Module):
    """Network k makes of the target's hidden state what its output embedding turns into the logits of k tokens later.

    As published but for that: there each network has an output embedding of its own, which begins as the target's.
    """

    token_ids: Tensor | None
    accuracies: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(_Head(config) for _ in range(config.heads))
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("token_ids", ids)
        # (heads · RANKS,) how often the i-th best guess is right; before that is measured, half as often as the last.
        self.register_buffer("accuracies", (0.5 ** torch.arange(1.0, RANKS + 1)).repeat(config.heads))

    def features(self, context: Tensor) -> Tensor:
        """The target's hidden states (..., context) -> (heads, ..., embedding)."""
        count = len(self.config.layers)
        each = context.reshape(*context.shape[:-1], count, self.config.context_size // count)
        unit = F.rms_norm(each, each.shape[-1:]).flatten(-2)
        return torch.stack([head(unit) for head in self.heads])

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        """Rows (V', embedding) that features become logits with."""
        return output_embedding


class _Head(nn.Module):
    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        width = config.exit_size
        self.into = nn.Linear(config.context_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.blocks))
        self.out = nn.Linear(width, config.embedding_size, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        x = self.into(context)
        for block in self.blocks:
            x = x + F.silu(block(F.rms_norm(x, x.shape[-1:])))
        out: Tensor = self.out(F.rms_norm(x, x.shape[-1:]) * x.shape[-1] ** -0.25)
        return out
