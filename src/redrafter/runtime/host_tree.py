"""Trees that the host packs from drafted nodes, where the host chooses the nodes: `kernels.tree_pack` without tensors.

For the few nodes of a CPU's draft, lists take a fraction of the time of a hundred operations on small tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from redrafter.core.beam import Beam
from redrafter.core.chain import Chain
from redrafter.core.tree import Nodes, Tree


@dataclass(frozen=True)
class HostNodes:
    """`core.tree.Nodes` as lists: by row, by node. Node m has the id m + 1, and `parents` are ids.

    levels: of the search that found them.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    scores: list[list[float]]
    levels: int

    @classmethod
    def of(cls, drafted: Nodes | Beam, chain: Chain | None = None) -> "HostNodes":
        """Nodes as they are; or all that a search visited, with the rest of its chain (`core.beam.visited_nodes`)."""
        if isinstance(drafted, Beam):
            return cls._of_beam(drafted, chain)
        return cls(
            tokens=drafted.tokens.tolist(),
            parents=drafted.parents.tolist(),
            depths=drafted.depths.tolist(),
            scores=drafted.scores.tolist(),
            levels=drafted.length,
        )

    @classmethod
    def _of_beam(cls, beam: Beam, chain: Chain | None) -> "HostNodes":
        batch, length, width = beam.tokens.shape
        depths = [depth + 1 for depth in range(length) for _ in range(width)]
        parents = [
            [0 if depth == 0 else 1 + (depth - 1) * width + at for depth, level in enumerate(row) for at in level]
            for row in beam.parents.tolist()
        ]
        nodes = cls(
            tokens=beam.tokens.flatten(1).tolist(),
            parents=parents,
            depths=[depths.copy() for _ in range(batch)],
            scores=beam.scores.flatten(1).tolist(),
            levels=length,
        )
        if chain is not None and beam.follows is not None and chain.length > length:
            nodes._append(chain, beam.follows.tolist(), length, width)
        return nodes

    def _append(self, chain: Chain, follows: list[list[bool]], length: int, width: int) -> None:
        """`core.chain.append_chain`: the rest of the chain below the path that has followed the chain all along."""
        odds = chain.odds[:, length:].log().cumsum(1).tolist()
        for row, (tokens, more) in enumerate(zip(chain.tokens[:, length:].tolist(), odds, strict=True)):
            if True not in follows[row]:
                continue
            parent = 1 + (length - 1) * width + follows[row].index(True)
            score = self.scores[row][parent - 1]
            for depth, (token, below) in enumerate(zip(tokens, more, strict=True), length + 1):
                self.tokens[row].append(token)
                self.parents[row].append(parent)
                self.depths[row].append(depth)
                self.scores[row].append(score + below)
                parent = len(self.tokens[row])


def host_tree(nodes: HostNodes, chosen: Sequence[Sequence[int]], last: Tensor) -> Tree:
    """The chosen ids of each row, in ascending order and each after its parent, below the last tokens (B,) -> trees.

    >>> nodes = HostNodes([[5, 6, 7]], [[0, 0, 1]], [[1, 1, 2]], [[-0.1, -2.0, -0.5]], levels=2)
    >>> tree = host_tree(nodes, [[1, 3]], torch.tensor([4]))
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.length
    ([[4, 5, 7]], [[0, 0, 1]], [[0, 1, 2]], 2)
    """
    width = max(map(len, chosen))
    tokens, layout = [], []
    for root, known, above, ids in zip(last.tolist(), nodes.tokens, nodes.parents, chosen, strict=True):
        place = {node: i for i, node in enumerate(ids, 1)}
        place[0] = 0
        tokens.append([root, *(known[node - 1] for node in ids), *[0] * (width - len(ids))])
        layout.append(tuple(place[above[node - 1]] for node in ids))
    parents, depths, valid, mask, length = tree_layout(tuple(layout), width)
    return Tree(torch.tensor(tokens), parents, depths, valid, mask, length)


@lru_cache(maxsize=1024)
def tree_layout(rows: tuple[tuple[int, ...], ...], width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """What trees of the same form share: parents, depths, which nodes are real, masks, and the depth of the deepest.

    rows: the parent of each node behind the root; up to `width` nodes, empty ones hang below the root.
    """
    parents, depths, valid, mask = [], [], [], []
    for row in rows:
        empty = width - len(row)
        above, deep, seen = [0], [0], [[True] + [False] * width]
        for node, parent in enumerate([*row, *[0] * empty], 1):
            above.append(parent)
            deep.append(deep[parent] + 1)
            seen.append([sees or i == node for i, sees in enumerate(seen[parent])])
        parents.append(above)
        depths.append(deep)
        valid.append([True] * (len(row) + 1) + [False] * empty)
        mask.append(seen)
    deepest = max(map(max, depths)) if width else 0
    return torch.tensor(parents), torch.tensor(depths), torch.tensor(valid), torch.tensor(mask), deepest
