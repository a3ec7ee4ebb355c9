"""Fixed trees: if drafted tokens do not depend on each other, the tree's shape can be chosen in advance."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.tree import Tree, ancestors

Path = tuple[int, ...]
"""The rank of each drafted token from the root down: (0, 2) is the third best token after the best one."""


def sparse_tree(accuracies: Sequence[Sequence[float]], width: int, length: int, nodes: int) -> list[Path]:
    """The `nodes` paths that are right most often; rank i is right at depth d with frequency `accuracies[d][i]`.

    Different depths are assumed independent, as in Medusa. A path is never more probable than its prefix, so the
    chosen paths form a tree.

    >>> sparse_tree([[0.6, 0.2], [0.5, 0.1]], width=2, length=2, nodes=3)
    [(0,), (1,), (0, 0)]
    """
    depth = min(length, len(accuracies))
    waiting: list[tuple[float, Path]] = []

    def offer(path: Path, cost: float) -> None:
        for rank, chance in enumerate(accuracies[len(path)][:width]):
            heapq.heappush(waiting, (cost - math.log(max(chance, 1e-9)), (*path, rank)))

    offer((), 0.0)
    chosen: list[Path] = []
    while waiting and len(chosen) < nodes:
        cost, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < depth:
            offer(path, cost)
    return sorted(chosen, key=lambda path: (len(path), path))


@dataclass(frozen=True)
class FixedTree:
    """The same tree for every row; index 0 is the root."""

    parents: Tensor  # (1, N+1)
    depths: Tensor  # (1, N+1)
    mask: Tensor  # (1, N+1, N+1)
    source: Tensor  # (1, N) which of the depth × width best tokens each node holds
    width: int
    length: int

    @staticmethod
    def of(paths: Sequence[Path], device: torch.device) -> "FixedTree":
        """The tree of these paths, which come in depth order, each after its prefix.

        >>> tree = FixedTree.of([(0,), (1,), (0, 0)], torch.device("cpu"))
        >>> tree.parents.tolist(), tree.source.tolist()
        ([[0, 0, 0, 1]], [[0, 1, 2]])
        """
        place = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
        width, length = 1 + max(max(path) for path in paths), max(map(len, paths))
        parents = torch.tensor([[0, *(place[path[:-1]] for path in paths)]], device=device)
        depths = torch.tensor([[0, *map(len, paths)]], device=device)
        source = torch.tensor([[(len(path) - 1) * width + path[-1] for path in paths]], device=device)
        return FixedTree(parents, depths, ancestors(parents, length), source, width, length)

    def fill(self, best: Tensor, last: Tensor) -> Tree:
        """Put the best tokens of each depth (B, length, width) into their nodes."""
        batch = last.shape[0]
        tokens = best.flatten(1).gather(1, self.source.expand(batch, -1))
        every = torch.cat([last[:, None], tokens], 1)
        return Tree(
            tokens=every,
            parents=self.parents.expand(batch, -1),
            depths=self.depths.expand(batch, -1),
            valid=torch.ones_like(every, dtype=torch.bool),
            mask=self.mask.expand(batch, -1, -1),
            length=self.length,
        )
