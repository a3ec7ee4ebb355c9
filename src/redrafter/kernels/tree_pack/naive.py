"""The best nodes of a draft as a tree in arrays: the oracle."""

import torch
from torch import Tensor

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Tokens, parents, depths, valid (B, N+1), mask (B, N+1, N+1), the place of each old id (B, M+1), 0 if dropped, and
scores (B, N+1): never above the parent's, inf for the root, -inf for empty nodes."""


def ancestors(parents: Tensor, length: int) -> Tensor:
    """(B, n) parent indices (the root is its own parent) -> (B, n, n) bool: j is i or an ancestor of i.

    >>> ancestors(torch.tensor([[0, 0, 1, 1]]), 2)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    batch, n = parents.shape
    own = torch.eye(n, dtype=torch.bool, device=parents.device).expand(batch, n, n)
    index = parents[:, :, None].expand(batch, n, n)
    mask = own
    for _ in range(length):
        mask = own | mask.gather(1, index)
    return mask


def pack(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, last: Tensor, budget: int, length: int
) -> Packed:
    """Nodes (B, M), depth by depth, and the last token (B,) -> the `budget` best nodes below the last token.

    Node m has the id m + 1, and `parents` are ids; the root has id 0. No node is deeper than `length`. A score that
    rounding put above the parent's is lowered to it, and equal scores keep depth order. So the kept set is closed under
    parents in floating point too.
    """
    batch, total = tokens.shape
    root = scores.new_full((batch, 1), torch.inf)
    for _ in range(length):
        scores = torch.minimum(scores, torch.cat([root, scores], 1).gather(1, parents))
    best, order = scores.sort(dim=1, descending=True, stable=True)
    # (B, N) back in depth order, empty nodes last
    kept = torch.where(best > -torch.inf, order, order + total)[:, :budget].sort(dim=1).values % total
    place = torch.zeros(batch, total + 1, dtype=torch.long, device=kept.device)
    place.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept))
    zero = torch.zeros_like(kept[:, :1])
    lowered = torch.cat([root, scores.gather(1, kept)], 1)
    above = torch.cat([zero, place.gather(1, parents.gather(1, kept))], 1)
    return (
        torch.cat([last[:, None], tokens.gather(1, kept)], 1),
        above,
        torch.cat([zero, depths.gather(1, kept)], 1),
        lowered > -torch.inf,
        ancestors(above, min(length, budget)),  # N nodes that are closed under parents are at most N deep
        place,
        lowered,
    )
