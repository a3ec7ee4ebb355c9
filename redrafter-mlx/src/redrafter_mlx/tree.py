"""Dynamic tree attention: drafted tokens as a tree of unique nodes, in arrays of fixed size.

A beam search knows each node's parent, so the W·L nodes it visited are unique. Candidate sequences share prefixes,
which must be found first (`dedup_prefix`, as in the papers). `pack` then keeps the N best nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Nodes:
    """Drafted nodes before packing, depth by depth. Node m has the id m + 1; id 0 is the root."""

    tokens: mx.array  # (B, M)
    parents: mx.array  # (B, M) ids
    depths: mx.array  # (B, M) from 1
    scores: mx.array  # (B, M) log-probability of the path to the node; -inf marks an empty node
    length: int  # depth of the deepest node


@dataclass(frozen=True)
class Tree:
    """A packed tree. Index 0 is the root (the last token); parents come before their children."""

    tokens: mx.array  # (B, N+1)
    parents: mx.array  # (B, N+1) indices; the root is its own parent
    depths: mx.array  # (B, N+1) the root has depth 0
    valid: mx.array  # (B, N+1) bool; empty nodes come last and are never accepted
    mask: mx.array  # (B, N+1, N+1) bool; mask[b, i, j]: j is i or an ancestor of i
    length: int  # largest possible depth

    @property
    def nodes(self) -> int:
        """N: drafted nodes, without the root."""
        return self.tokens.shape[1] - 1


def gather(x: mx.array, index: mx.array) -> mx.array:
    """(B, n) values at (B, m) indices."""
    return mx.take_along_axis(x, index, axis=1)


def last_tokens(texts: Sequence[list[int]]) -> mx.array:
    """(B,) the roots of trees."""
    return mx.array([text[-1] for text in texts])


def padded(rows: Sequence[list[int]]) -> mx.array:
    """(B, n) token ids, with zeros behind the shorter rows."""
    longest = max(len(row) for row in rows)
    return mx.array([row + [0] * (longest - len(row)) for row in rows])


def root_tree(texts: Sequence[list[int]]) -> Tree:
    """Trees without any drafted node: plain decoding."""
    tokens = last_tokens(texts)[:, None]
    zero = mx.zeros_like(tokens)
    return Tree(tokens, zero, zero, zero == 0, (zero == 0)[:, None], length=0)


def ancestors(parents: mx.array, length: int) -> mx.array:
    """(B, n) parent indices (the root is its own parent) -> (B, n, n) bool: j is i or an ancestor of i.

    >>> ancestors(mx.array([[0, 0, 1, 1]]), 2)[0].astype(mx.int32).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    batch, n = parents.shape
    own = mx.broadcast_to(mx.eye(n, dtype=mx.bool_), (batch, n, n))
    index = mx.broadcast_to(parents[:, :, None], (batch, n, n))
    mask = own
    for _ in range(length):
        mask = own | mx.take_along_axis(mask, index, axis=1)
    return mask


def dedup_prefix(beam: mx.array) -> mx.array:
    """For each prefix of each candidate (B, W, L), the smallest candidate index that shares it.

    >>> dedup_prefix(mx.array([[[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]])).tolist()
    [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    """
    same = beam[:, :, None, :] == beam[:, None, :, :]  # (B, W, W, L)
    shared = mx.cumprod(same.astype(mx.int32), axis=-1)  # 1 while every token up to here is the same
    return shared.argmax(axis=2).astype(mx.int32)  # the first of equal maxima is the smallest index


def candidate_nodes(beam: mx.array, scores: mx.array) -> tuple[Nodes, mx.array]:
    """Candidates (B, W, L) with node scores (B, W, L) -> unique nodes, and each token's node id (B, W, L).

    A token whose prefix an earlier candidate shares gets that candidate's node; its own place becomes an empty node.
    """
    batch, width, length = beam.shape
    owner = dedup_prefix(beam)
    depth = mx.arange(length)
    ids = 1 + depth * width + owner
    parents = mx.concatenate([mx.zeros_like(ids[..., :1]), ids[..., :-1]], axis=-1)
    first = owner == mx.arange(width)[:, None]

    def flat(x: mx.array) -> mx.array:
        return x.swapaxes(1, 2).reshape(batch, width * length)  # depth by depth

    nodes = Nodes(
        tokens=flat(beam),
        parents=flat(parents),
        depths=flat(mx.broadcast_to(depth + 1, beam.shape)),
        scores=flat(mx.where(first, scores, -mx.inf)),
        length=length,
    )
    return nodes, ids


def pack(nodes: Nodes, last: mx.array, budget: int) -> tuple[Tree, mx.array]:
    """Keep the `budget` best nodes; also return each old id's place in the tree (B, M+1), 0 if dropped.

    A score that rounding put above the parent's is lowered to it, and equal scores keep depth order. So the kept set
    is closed under parents in floating point too. Ranks are counted by comparing all pairs: there are few nodes, and
    no sort has to be stable.
    """
    batch, total = nodes.tokens.shape
    budget = min(budget, total)
    scores = nodes.scores
    root = mx.full((batch, 1), mx.inf, dtype=scores.dtype)
    for _ in range(nodes.length):
        scores = mx.minimum(scores, gather(mx.concatenate([root, scores], axis=1), nodes.parents))
    index = mx.arange(total)
    earlier = index[None, :] < index[:, None]  # (M, M): node j comes before node i
    better = (scores[:, None, :] > scores[:, :, None]) | ((scores[:, None, :] == scores[:, :, None]) & earlier)
    kept = better.astype(mx.int32).sum(-1) < budget  # (B, M)
    order = mx.where(scores > -mx.inf, index, index + total)  # depth order, empty nodes last
    ahead = (order[:, None, :] < order[:, :, None]) & kept[:, None, :]
    place = mx.where(kept, 1 + ahead.astype(mx.int32).sum(-1), 0)  # (B, M)
    slot = mx.arange(1, budget + 1)
    source = (place[:, None, :] == slot[:, None]).astype(mx.int32).argmax(-1)  # (B, N) the node in each place
    place = mx.concatenate([mx.zeros((batch, 1), dtype=mx.int32), place], axis=1)

    length = min(nodes.length, budget)  # a set of N nodes that is closed under parents is at most N deep
    zero = mx.zeros((batch, 1), dtype=mx.int32)
    parents = mx.concatenate([zero, gather(place, gather(nodes.parents, source))], axis=1)
    tree = Tree(
        tokens=mx.concatenate([last[:, None], gather(nodes.tokens, source)], axis=1),
        parents=parents,
        depths=mx.concatenate([zero, gather(nodes.depths, source)], axis=1),
        valid=mx.concatenate([zero == 0, gather(scores, source) > -mx.inf], axis=1),
        mask=ancestors(parents, length),
        length=length,
    )
    return tree, place


def pack_beam(beam: mx.array, last: mx.array, budget: int | None = None) -> tuple[Tree, mx.array]:
    """The papers' packing: candidates (B, W, L) -> tree, and each token's place in it (B, W, L).

    >>> tree, place = pack_beam(mx.array([[[91, 92], [91, 93], [94, 92]]]), mx.array([90]))
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.valid.astype(mx.int32).tolist()
    ([[90, 91, 94, 92, 93, 92, 91]], [[0, 0, 0, 1, 1, 2, 0]], [[1, 1, 1, 1, 1, 1, 0]])
    """
    nodes, ids = candidate_nodes(beam, mx.zeros(beam.shape))
    total = nodes.tokens.shape[1]
    tree, place = pack(nodes, last, total if budget is None else budget)
    return tree, gather(place, ids.reshape(ids.shape[0], -1)).reshape(ids.shape)
