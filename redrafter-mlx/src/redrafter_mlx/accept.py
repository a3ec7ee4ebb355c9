"""What a step accepted: the deepest path of the tree along which the target chooses the drafted tokens."""

from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.tree import Tree, gather


@dataclass(frozen=True)
class Accepted:
    """What one step decided. The target chose entry j of `tokens` at node `path[:, j]`."""

    path: mx.array  # (B, L+1) node indices, root first; entries from `count` on are meaningless
    tokens: mx.array  # (B, L+1) new tokens: the accepted ones, then the target's own next one
    count: mx.array  # (B,) new tokens: accepted + 1
    nodes: mx.array  # (B,) verified nodes that held a drafted token


def path_to(tree: Tree, leaf: mx.array) -> mx.array:
    """(B,) node indices -> (B, L+1) the nodes from the root down to each."""
    above = mx.take_along_axis(tree.mask, leaf[:, None, None], axis=1)  # (B, 1, N+1)
    depth = mx.arange(tree.length + 1)[:, None]
    return (above & (tree.depths[:, None] == depth)).astype(mx.int32).argmax(-1).astype(mx.int32)


def deepest(tree: Tree, hit: mx.array) -> mx.array:
    """(B, N+1) bool -> (B,) the deepest node that is hit together with all its ancestors."""
    hit = (hit & tree.valid) | (mx.arange(hit.shape[1]) == 0)
    reached = (hit[:, None] | ~tree.mask).all(-1)
    return mx.where(reached, tree.depths, -1).argmax(-1).astype(mx.int32)


def accept_seeded(choice: mx.array, tree: Tree) -> Accepted:
    """Follow the target's choices (B, N+1) down the tree for as long as the choice at a node is one of its children.

    >>> from redrafter_mlx.tree import pack_beam
    >>> tree, _ = pack_beam(mx.array([[[5, 6], [5, 7]]]), mx.array([4]))  # 4 -> 5 -> {6, 7}
    >>> accepted = accept_seeded(mx.array([[5, 7, 0, 8, 0]]), tree)  # after 4: 5; after 5: 7; after 7: 8
    >>> accepted.tokens.tolist(), accepted.count.tolist()
    ([[5, 7, 8]], [3])
    """
    leaf = deepest(tree, tree.tokens == gather(choice, tree.parents))
    path = path_to(tree, leaf)
    depth = gather(tree.depths, leaf[:, None])[:, 0]
    return Accepted(path, gather(choice, path), depth + 1, tree.valid.astype(mx.int32).sum(1) - 1)
