"""Acceptance rules that look at target scores alone: `seeded` (lossless) and `typical` (lossy)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.core.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """What one step decided. Entry j of `tokens` was chosen by the target at node `path[:, j]`."""

    path: Tensor  # (B, L+1) node indices, root first; beyond `count` of no meaning
    tokens: Tensor  # (B, L+1) new tokens: the accepted ones, then the target's own next one
    count: Tensor  # (B,) new tokens: accepted + 1, fewer where the row ends
    drafted: Tensor  # (B,) how many tokens, from the first on, were guessed, wherever the row ends
    nodes: Tensor  # (B,) verified nodes that stood for a guess


def at_depth(scores: Tensor, noise: Tensor, tree: Tree) -> Tensor:
    """Add to each node's scores (B, N+1, V) the noise (B, L+1, V) of the position it predicts."""
    index = tree.depths[:, :, None].expand(-1, -1, scores.shape[-1])
    return scores + noise.gather(1, index).to(scores.dtype)


def path_to(tree: Tree, leaf: Tensor) -> Tensor:
    """(B,) node indices -> (B, L+1) the nodes from the root down to it."""
    above = tree.mask.gather(1, leaf[:, None, None].expand(-1, 1, tree.mask.shape[2]))  # (B, 1, N+1)
    depth = torch.arange(tree.length + 1, device=leaf.device)[:, None]
    return (above & (tree.depths[:, None] == depth)).int().argmax(-1)


def deepest(tree: Tree, hit: Tensor) -> Tensor:
    """(B, N+1) bool -> (B,) the deepest node that is hit together with all its ancestors."""
    hit = (hit & tree.valid) | (torch.arange(hit.shape[1], device=hit.device) == 0)
    reached = (hit[:, None] | ~tree.mask).all(-1)
    return torch.where(reached, tree.depths, -1).argmax(-1)


def walk(tree: Tree, choice: Tensor, hit: Tensor) -> Accepted:
    leaf = deepest(tree, hit)
    path = path_to(tree, leaf)
    depth = tree.depths.gather(1, leaf[:, None])[:, 0]
    return Accepted(path, choice.gather(1, path), count=depth + 1, drafted=depth, nodes=tree.valid.sum(1) - 1)


def accept_seeded(scores: Tensor, tree: Tree, noise: Tensor | None) -> Accepted:
    """Follow the target's own choices down the tree for as long as they have a child.

    The choice at a node is argmax(scores + noise of its position): exactly what plain decoding
    would choose there, so the result is plain decoding's, whatever was guessed. No noise at
    temperature 0.
    """
    choice = (scores if noise is None else at_depth(scores, noise, tree)).argmax(-1)  # (B, N+1)
    return walk(tree, choice, hit=tree.tokens == choice.gather(1, tree.parents))


def typical_threshold(logp: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(epsilon, delta · exp(−H)) of each distribution.

    >>> even = torch.full((4,), 0.25).log()
    >>> round(float(typical_threshold(even, epsilon=0.3, delta=0.09)), 4)  # 0.09 / 4
    0.0225
    """
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def accept_typical(scores: Tensor, tree: Tree, noise: Tensor | None, *, epsilon: float, delta: float) -> Accepted:
    """Lossy: accept every node whose probability exceeds its parent's threshold; keep the deepest path."""
    logp = scores.log_softmax(-1)  # (B, N+1, V)
    threshold = typical_threshold(logp, epsilon, delta)  # (B, N+1)
    index = tree.parents[:, :, None].expand_as(logp[..., :1]).expand_as(logp)
    probability = logp.gather(1, index).gather(2, tree.tokens[..., None])[..., 0].exp()
    hit = probability > threshold.gather(1, tree.parents)
    choice = (scores if noise is None else at_depth(scores, noise, tree)).argmax(-1)
    accepted = walk(tree, choice, hit)
    # An accepted token need not be the target's choice: the new tokens are the nodes' own, then the choice.
    nodes = tree.tokens.gather(1, accepted.path)
    drafted = torch.cat([nodes[:, 1:], nodes[:, :1]], dim=1)
    place = torch.arange(tree.length + 1, device=scores.device)
    tokens = torch.where(place < accepted.count[:, None] - 1, drafted, accepted.tokens)
    return replace(accepted, tokens=tokens)
