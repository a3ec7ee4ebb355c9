"""What the forward pass of a drafter's network receives in training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingBatch:
    """Texts padded right, and the n positions to learn from, text after text. A text's positions are consecutive.

    Position (row, t): the hidden state at t chose the last token, which stands at t + 1. Depth d guesses the token at
    t + 1 + d; the target's own distribution for that token comes from the hidden state at t + d.
    """

    tokens: Tensor  # (B, S)
    lengths: Tensor  # (B,)
    row: Tensor  # (n,)
    at: Tensor  # (n,)
    left: Tensor  # (n,) how many depths have a token to guess, at least 1
    first: Tensor  # (B,) the first position of each text
    most: int  # positions of the text that has the most
    rollouts: Tensor | None = None  # (n, T) what the target writes after t, for data made with --local

    @property
    def positions(self) -> int:
        return self.row.shape[0]

    def to(self, device: torch.device) -> "TrainingBatch":
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)

    @property
    def place(self) -> Tensor:
        """(n,) the number of each position within its text."""
        return self.at - self.first[self.row]

    def token_at(self, depth: int) -> Tensor:
        """(n,) the token that each position reads at a depth; depth 0 is the last token."""
        if self.rollouts is not None:
            return self.rollouts[:, min(depth, self.rollouts.shape[1] - 1)]
        at = (self.at + 1 + depth).clamp(max=self.tokens.shape[1] - 1)
        return self.tokens[self.row, at]


@dataclass(frozen=True)
class LossInput:
    """A batch with the target's hidden states, in the drafter's precision."""

    batch: TrainingBatch
    states: Tensor  # (B, S, C) of the drafter's layers
    embed: nn.Module  # the target's input embedding
    weights: Sequence[float]  # weight of each depth in the loss

    @property
    def depth(self) -> int:
        return len(self.weights)

    @property
    def context(self) -> Tensor:
        """(n, C) the hidden state at each position."""
        return self.states[self.batch.row, self.batch.at]

    def embedded(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens (...) -> (..., E)."""
        embedding: Tensor = self.embed(tokens)
        return embedding.detach().to(self.states.dtype)

    def padded(self, x: Tensor) -> Tensor:
        """Values per position (n, ...) -> (B, P, ...): the P positions of each text, zero where a text has fewer."""
        room = x.new_zeros(len(self.batch.lengths), self.batch.most, *x.shape[1:])
        return room.index_put_((self.batch.row, self.batch.place), x)
