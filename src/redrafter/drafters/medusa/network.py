"""Medusa's networks: each one reads the context alone and guesses the token at its own depth."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters.base import DrafterNet
from redrafter.drafters.medusa.config import MedusaConfig

RANKS = 16
"""For how many of each network's best tokens the accuracy is stored."""


class MedusaNet(DrafterNet):
    """Network k maps the target's hidden state to features; the target's output embedding makes logits of them.

    In the paper each network has an output embedding of its own, which starts as a copy of the target's, and reads the
    hidden state as it is (`bare`).
    """

    config: MedusaConfig
    accuracies: Tensor
    own: Tensor | None
    """(heads, V', embedding) the output embeddings of the networks."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        kind = BareHead if config.bare else MedusaHead
        self.heads = nn.ModuleList(kind(config) for _ in range(config.heads))
        own = torch.empty(config.heads, config.guessable, config.exit_size) if config.head == "own" else None
        self.register_parameter("own", None if own is None else nn.Parameter(own))
        # (heads · RANKS,) how often the i-th best guess is right; until measured, half as often as the one before.
        self.register_buffer("accuracies", (0.5 ** torch.arange(1.0, RANKS + 1)).repeat(config.heads))

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        return output_embedding if self.own is None else self.own

    def features(self, context: Tensor) -> Tensor:
        """The target's hidden states (..., context) -> (heads, ..., embedding)."""
        if self.config.bare:
            return torch.stack([head(context) for head in self.heads])
        count = len(self.config.layers)
        each = context.reshape(*context.shape[:-1], count, self.config.context_size // count)
        unit = F.rms_norm(each, each.shape[-1:]).flatten(-2)
        return torch.stack([head(unit) for head in self.heads])


class MedusaHead(nn.Module):
    """The network of one depth: residual blocks over the normalised context."""

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


class BareHead(nn.Module):
    """The same as the paper's authors publish it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(config.exit_size, config.exit_size) for _ in range(config.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x
