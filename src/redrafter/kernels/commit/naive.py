"""Commit in plain torch: gather the path, then write it, since sources and destinations overlap."""

import torch
from torch import Tensor


def commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move nodes `path` (B, P) of the tree, which begins at slot `lengths` (B,), to the slots from there on.

    `cache` is (layers, 2, B, K, S, D): the keys and values of all layers.

    >>> cache = torch.arange(6.0).view(1, 1, 1, 1, 6, 1)
    >>> commit(cache, torch.tensor([2]), torch.tensor([[0, 2]]))
    >>> cache.flatten().tolist()
    [0.0, 1.0, 2.0, 4.0, 4.0, 5.0]
    """
    source = lengths[:, None] + path
    target = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    rows = torch.arange(len(lengths), device=path.device)[:, None]
    by_slot = cache.permute(2, 4, 0, 1, 3, 5)  # (B, S, layers, 2, K, D)
    by_slot[rows, target] = by_slot[rows, source]
