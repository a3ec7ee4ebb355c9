"""What a step tells the host about its tree."""

import torch

from redrafter.core.accept import Accepted
from redrafter.core.tree import Tree, ancestors
from redrafter.runtime.result_line import ResultLine, encoded


def test_the_tree_that_is_told_has_the_verified_nodes_only() -> None:
    """A budget of all rows drops nodes anywhere in a row's tree."""
    tokens, parents = torch.tensor([[9, 1, 2, 3]]), torch.tensor([[0, 0, 0, 1]])
    valid = torch.tensor([[True, True, False, True]])
    tree = Tree(tokens, parents, torch.tensor([[0, 1, 1, 2]]), valid, ancestors(parents, 2), length=2)
    accepted = Accepted(
        path=torch.tensor([[0, 1, 3]]),
        tokens=torch.tensor([[1, 3, 8]]),
        count=torch.tensor([3]),
        drafted=torch.tensor([2]),
        nodes=torch.tensor([2]),
    )
    (line,) = encoded(accepted, torch.tensor([False]), tree).tolist()
    assert ResultLine(line, 3).tree == ([9, 1, 3], [0, 0, 1], [0, 1, 2])
