"""What a step accepted, and how a rule finds it: walking the packed tree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """What one step decided. The target chose entry j of `tokens` at node `path[:, j]`."""

    path: Tensor  # (B, L+1) node indices, root first; entries from `count` on are meaningless
    tokens: Tensor  # (B, L+1) new tokens: the accepted ones, then the target's own next one; also up to `count`
    count: Tensor  # (B,) new tokens: accepted + 1, fewer where the row ends
    drafted: Tensor  # (B,) how many of the leading tokens were drafted, even those past the row's end
    nodes: Tensor  # (B,) verified nodes that held a drafted token


def path_to(tree: Tree, leaf: Tensor) -> Tensor:
    """(B,) node indices -> (B, L+1) the nodes from the root down to each."""
    above = tree.mask.gather(1, leaf[:, None, None].expand(-1, 1, tree.mask.shape[2]))  # (B, 1, N+1)
    depth = torch.arange(tree.length + 1, device=leaf.device)[:, None]
    return (above & (tree.depths[:, None] == depth)).int().argmax(-1)


def deepest(tree: Tree, hit: Tensor) -> Tensor:
    """(B, N+1) bool -> (B,) the deepest node that is hit together with all its ancestors."""
    hit = (hit & tree.valid) | (torch.arange(hit.shape[1], device=hit.device) == 0)
    reached = (hit[:, None] | ~tree.mask).all(-1)
    return torch.where(reached, tree.depths, -1).argmax(-1)


def walk(tree: Tree, choice: Tensor, hit: Tensor) -> Accepted:
    """Accept the deepest path of hit nodes (B, N+1); the new tokens are the choices (B, N+1) along the path."""
    leaf = deepest(tree, hit)
    path = path_to(tree, leaf)
    depth = tree.depths.gather(1, leaf[:, None])[:, 0]
    return Accepted(path, choice.gather(1, path), count=depth + 1, drafted=depth, nodes=tree.valid.sum(1) - 1)
