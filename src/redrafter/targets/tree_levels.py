"""The nodes of trees by their depths, for layers with a recurrent state; the host waits for the trees."""

import torch
from torch import Tensor

from redrafter.core.recurrence import Level, TreePass
from redrafter.core.tree import Tree


def tree_levels(tree: Tree, lengths: Tensor) -> TreePass:
    """Trees behind rows of `lengths` (B,) tokens. Empty nodes are left out.

    >>> from redrafter.core.tree import pack_beam
    >>> tree, _ = pack_beam(torch.tensor([[[5, 6], [5, 7]]]), torch.tensor([4]))  # 4 -> 5 -> {6, 7}
    >>> [level.columns.tolist() for level in tree_levels(tree, torch.tensor([9])).levels]
    [[0], [1], [2, 3]]
    """
    depths = torch.where(tree.valid, tree.depths, -1)
    levels = []
    for first in (True, False):
        rows, columns = ((depths == 0) & ((lengths == 0) == first)[:, None]).nonzero(as_tuple=True)
        if len(rows):
            levels.append(Level(rows, columns, None, first))
    for depth in range(1, int(depths.max()) + 1):
        rows, columns = (depths == depth).nonzero(as_tuple=True)
        levels.append(Level(rows, columns, tree.parents[rows, columns]))
    return TreePass(levels, tree.tokens.shape[1])
