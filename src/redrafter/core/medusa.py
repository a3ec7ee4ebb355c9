"""Medusa's networks (arXiv 2401.10774): for each depth one that reads the context alone, all guessing at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.config import MedusaConfig

RANKS = 16
"""How many of each network's best tokens its accuracies are counted for."""


class MedusaNet(nn.Module):
    """Network k adds to the target's last hidden state what makes it the state k tokens later.

    The target's own output embedding turns the sum into logits. As published, a network begins as one that
    changes nothing; unlike published, it has no output embedding of its own.
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
        return torch.stack([each[..., -1, :] + head(unit) for head in self.heads])

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
        nn.init.zeros_(self.out.weight)

    def forward(self, context: Tensor) -> Tensor:
        x = F.silu(self.into(context))
        for block in self.blocks:
            x = x + F.silu(block(F.rms_norm(x, x.shape[-1:])))
        out: Tensor = self.out(F.rms_norm(x, x.shape[-1:]) * x.shape[-1] ** -0.25)
        return out
