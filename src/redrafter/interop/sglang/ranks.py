"""What all ranks of a tensor-parallel engine use: the first rank's values, since rounding may differ between ranks."""

from dataclasses import replace

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.tree import Tree


class Ranks:
    def __init__(self, size: int) -> None:
        self.size = size

    def values(self, values: Tensor) -> Tensor:
        if self.size > 1:
            from sglang.srt.distributed import get_tp_group

            get_tp_group().broadcast(values, src=0)
        return values

    def accepted(self, accepted: Accepted) -> Accepted:
        if self.size == 1:
            return accepted
        path, tokens, count = accepted.path, accepted.tokens, accepted.count
        packed = self.values(torch.cat([path, tokens, count[:, None]], 1))
        path, tokens, count = torch.split(packed, [path.shape[1], tokens.shape[1], 1], 1)
        return replace(accepted, path=path, tokens=tokens, count=count[:, 0])

    def tree(self, tree: Tree) -> Tree:
        if self.size == 1:
            return tree
        rows, n = tree.tokens.shape
        fields = [tree.tokens, tree.parents, tree.depths, tree.valid, tree.mask.flatten(1)]
        packed = self.values(torch.cat([x.long() for x in fields], 1))
        tokens, parents, depths, valid, mask = torch.split(packed, [n, n, n, n, n * n], 1)
        return Tree(tokens, parents, depths, valid.bool(), mask.view(rows, n, n).bool(), tree.length)
