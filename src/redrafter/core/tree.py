"""Dynamic tree attention: drafted tokens as a tree of unique nodes, in arrays of fixed size.

A beam search knows each node's parent, so the W·L nodes it visited are unique (`visited_nodes`). Candidate sequences
share prefixes, which must be found first (`dedup_prefix`, as in the papers). `pack` then keeps the N best nodes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.kernels import tree_pack
from redrafter.kernels.tree_pack import ancestors as ancestors


@dataclass(frozen=True)
class Nodes:
    """Drafted nodes before packing, depth by depth. Node m has the id m + 1; id 0 is the root."""

    tokens: Tensor  # (B, M)
    parents: Tensor  # (B, M) ids
    depths: Tensor  # (B, M) from 1
    scores: Tensor  # (B, M) log-probability of the path to the node; -inf marks an empty node
    length: int  # depth of the deepest node


@dataclass(frozen=True)
class Tree:
    """A packed tree. Index 0 is the root (the last token); parents come before their children."""

    tokens: Tensor  # (B, N+1)
    parents: Tensor  # (B, N+1) indices; the root is its own parent
    depths: Tensor  # (B, N+1) the root has depth 0
    valid: Tensor  # (B, N+1) bool; empty nodes come last and are never accepted
    mask: Tensor  # (B, N+1, N+1) bool; mask[b, i, j]: j is i or an ancestor of i
    length: int  # largest possible depth
    scores: Tensor | None = None  # (B, N+1) log-probability of the path, never above the parent's; None: not known
    draft_logits: Tensor | None = None  # (B, I, V) raw: the children of node i < I were sampled from these
    draft_floor: Tensor | None = None  # (B, I) the smallest of them that the filters kept

    @property
    def nodes(self) -> int:
        """N: drafted nodes, without the root."""
        return self.tokens.shape[1] - 1


def root_tree(last: Tensor) -> Tree:
    """(B,) last tokens -> trees without any drafted node: plain decoding."""
    tokens = last[:, None]
    zero = torch.zeros_like(tokens)
    return Tree(tokens, zero, zero, zero == 0, (zero == 0)[:, None], length=0)


def chain_tree(last: Tensor, chains: Sequence[Sequence[int]]) -> Tree:
    """(B,) last tokens, and one guess for each row -> trees without branches; a shorter guess gets empty nodes.

    >>> tree = chain_tree(torch.tensor([4, 5]), [[6, 7], []])
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist()
    ([[4, 6, 7], [5, 0, 0]], [[0, 0, 1], [0, 0, 1]], [[True, True, True], [True, False, False]])
    """
    length = max(map(len, chains))
    padded = torch.tensor([[*chain, *[0] * (length - len(chain))] for chain in chains], device=last.device)
    real = torch.tensor([[i < len(chain) for i in range(length)] for chain in chains], device=last.device)
    return path_tree(last, padded, real)


def path_tree(last: Tensor, path: Tensor, real: Tensor | None = None) -> Tree:
    """(B,) last tokens, one path (B, L) below each, and which of its nodes (B, L) are no empty ones -> trees.

    Without `real`, none is empty.
    """
    batch, length = path.shape
    place, parents, mask, root = path_layout(length, last.device)
    return Tree(
        tokens=torch.cat([last[:, None], path], 1),
        parents=parents.expand(batch, -1),
        depths=place.expand(batch, -1),
        valid=root.expand(batch, length + 1) if real is None else torch.cat([root.expand(batch, 1), real], 1),
        mask=mask.expand(batch, -1, -1),
        length=length,
    )


@functools.lru_cache(maxsize=256)
def path_layout(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What all trees of one path have in common: depths, parents (L+1,), mask (L+1, L+1), and that the root is real."""
    place = torch.arange(length + 1, device=device)
    return place, (place - 1).clamp(min=0), place <= place[:, None], place[:1] == 0


def dedup_prefix(beam: Tensor) -> Tensor:
    """For each prefix of each candidate, the smallest candidate index that shares it.

    The papers' example (their listing compares each candidate with itself; it must be compared with the others):

    >>> dedup_prefix(torch.tensor([[[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]])).tolist()
    [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    """
    same = beam[:, :, None, :] == beam[:, None, :, :]  # (B, W, W, L)
    shared = same.cumprod(dim=-1)  # 1 while every token up to here is the same
    return shared.argmax(dim=2)  # (B, W, L); the first of equal maxima is the smallest index


def candidate_nodes(beam: Tensor, scores: Tensor) -> tuple[Nodes, Tensor]:
    """Candidates (B, W, L) with node scores (B, W, L) -> unique nodes, and each token's node id (B, W, L).

    A token whose prefix an earlier candidate shares gets that candidate's node; its own place becomes an empty node
    (score -inf).
    """
    batch, width, length = beam.shape
    owner = dedup_prefix(beam)  # (B, W, L)
    depth = torch.arange(length, device=beam.device)
    ids = 1 + depth * width + owner  # (B, W, L) of the node that holds this token
    parents = torch.cat([torch.zeros_like(ids[..., :1]), ids[..., :-1]], dim=-1)
    first = owner == torch.arange(width, device=beam.device)[:, None]

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch, width * length)  # depth by depth

    nodes = Nodes(
        tokens=flat(beam),
        parents=flat(parents),
        depths=flat((depth + 1).expand_as(beam)),
        scores=flat(scores.masked_fill(~first, -torch.inf)),
        length=length,
    )
    return nodes, ids


def pack(nodes: Nodes, last: Tensor, budget: int) -> tuple[Tree, Tensor]:
    """Keep the `budget` best nodes; also return each old id's place in the tree (B, M+1), 0 if dropped.

    A score that rounding put above the parent's is lowered to it, and equal scores keep depth order. So the kept set
    is closed under parents in floating point too.
    """
    tokens, parents, depths, valid, mask, place, scores = tree_pack.pack(
        nodes.tokens, nodes.parents, nodes.depths, nodes.scores, last, budget, nodes.length
    )
    length = min(nodes.length, budget)  # a set of N nodes that is closed under parents is at most N deep
    return Tree(tokens, parents, depths, valid, mask, length, scores), place


def within(tree: Tree, limit: Tensor) -> Tree:
    """Drop the nodes deeper than a row's limit (B,). Nodes are in depth order, so empty nodes stay last."""
    return replace(tree, valid=tree.valid & (tree.depths <= limit[:, None]))


def select_rows(choice: Tensor, first: Tree, second: Tree) -> Tree:
    """The rows of `first` where `choice` (B,), else those of `second`. The smaller tree gets empty nodes."""
    nodes = max(first.nodes, second.nodes)
    a, b = widened(first, nodes), widened(second, nodes)
    flat, square = choice[:, None], choice[:, None, None]
    return Tree(
        tokens=torch.where(flat, a.tokens, b.tokens),
        parents=torch.where(flat, a.parents, b.parents),
        depths=torch.where(flat, a.depths, b.depths),
        valid=torch.where(flat, a.valid, b.valid),
        mask=torch.where(square, a.mask, b.mask),
        length=max(a.length, b.length),
        scores=None if a.scores is None or b.scores is None else torch.where(flat, a.scores, b.scores),
    )


def widened(tree: Tree, nodes: int) -> Tree:
    """With empty nodes below the root, up to this many nodes."""
    extra = nodes - tree.nodes
    if not extra:
        return tree
    mask = F.pad(tree.mask, (0, extra, 0, extra)) | torch.eye(nodes + 1, dtype=torch.bool, device=tree.mask.device)
    mask[..., 0] = True
    return Tree(
        tokens=F.pad(tree.tokens, (0, extra)),
        parents=F.pad(tree.parents, (0, extra)),
        depths=F.pad(tree.depths, (0, extra), value=1),
        valid=F.pad(tree.valid, (0, extra)),
        mask=mask,
        length=tree.length,
        scores=None if tree.scores is None else F.pad(tree.scores, (0, extra), value=-torch.inf),
    )


def pack_beam(beam: Tensor, last: Tensor, budget: int | None = None) -> tuple[Tree, Tensor]:
    """The papers' packing: candidates (B, W, L) -> tree, and each token's place in it (B, W, L).

    >>> beam = torch.tensor([[[91, 92], [91, 93], [94, 92]]])
    >>> tree, place = pack_beam(beam, torch.tensor([90]))
    >>> tree.tokens[tree.valid].tolist(), tree.parents[tree.valid].tolist()
    ([90, 91, 94, 92, 93, 92], [0, 0, 0, 1, 1, 2])
    >>> bool((unpack_beam(tree.tokens, place) == beam).all())
    True
    """
    nodes, ids = candidate_nodes(beam, torch.zeros(beam.shape, device=beam.device))
    total = nodes.tokens.shape[1]
    tree, place = pack(nodes, last, total if budget is None else budget)
    return tree, place.gather(1, ids.flatten(1)).view_as(ids)


def unpack_beam(values: Tensor, place: Tensor) -> Tensor:
    """Per-node values (B, N+1) -> the same by candidate and depth (B, W, L)."""
    return values.gather(1, place.flatten(1)).view_as(place)
