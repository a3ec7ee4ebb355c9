"""Tokens that the host copied from a row's own text, as guesses for one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.chain import Chain
from redrafter.core.tree import Tree, chain_tree


@dataclass(frozen=True)
class Copied:
    """One guess for one row."""

    tokens: Sequence[int] = ()
    odds: Sequence[float] = ()  # of each token if all tokens before are right; only a draft needs them


def as_chain(rows: Sequence[Copied], device: torch.device) -> Chain:
    """The guesses, to be mixed into a draft. A row without a guess has odds of 0."""
    length = max(len(row.odds) for row in rows)
    return Chain(
        torch.tensor([[*row.tokens, *[0] * (length - len(row.tokens))] for row in rows], device=device),
        torch.tensor([[*row.odds, *[0.0] * (length - len(row.odds))] for row in rows], device=device),
    )


def as_tree(rows: Sequence[Copied], last: Tensor) -> Tree:
    """The guesses alone, below the last tokens (B,)."""
    return chain_tree(last, [row.tokens for row in rows])
