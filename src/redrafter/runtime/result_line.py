"""What a step tells the host: for each row a line of integers.

Count, drafted, done and nodes; then the new tokens, the accepted path, and the tree's tokens and parents (-1 for a node
that was not verified). Behind them, in planned steps, how many nodes should have been accepted, in millionths, with
each budget that the host may choose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.tree import Tree

COUNTS = 4
MILLION = 1_000_000


def encoded(accepted: Accepted, done: Tensor, tree: Tree, promised: Tensor | None = None) -> Tensor:
    """(B, ...) the lines of all rows. promised: (B, K) see `core.flat`."""
    counts = torch.stack((accepted.count, accepted.drafted, done.long(), accepted.nodes), dim=1)
    parents = torch.where(tree.valid, tree.parents, -1)
    parts = [counts, accepted.tokens, accepted.path, tree.tokens, parents]
    return torch.cat(parts if promised is None else [*parts, (promised * MILLION).long()], dim=1)


def line(
    counts: tuple[int, int, int, int], new: list[int], path: list[int], tokens: list[int], parents: list[int]
) -> list[int]:
    """One row's line, made on the host."""
    return [*counts, *new, *path, *tokens, *parents]


def new_tokens(lines: Tensor, tree: Tree, budgets: int = 0) -> int:
    """How many of a line's integers are new tokens."""
    return (lines.shape[1] - COUNTS - 2 * tree.tokens.shape[1] - budgets) // 2


class ResultLine:
    """One row's line, read; `width` tokens are the new ones, of which the first `count` are real.

    budgets: how many the host may choose among.
    """

    def __init__(self, values: Sequence[int], width: int, budgets: int = 0) -> None:
        self.values, self.width = values[: len(values) - budgets], width
        self.promised = [value / MILLION for value in values[len(values) - budgets :]]
        self.count, self.drafted, self.done, self.nodes = values[:COUNTS]

    @property
    def tokens(self) -> Sequence[int]:
        """The new tokens."""
        return self.values[COUNTS : COUNTS + self.count]

    @property
    def path(self) -> Sequence[int]:
        """The node that each new token was chosen at, the root first."""
        begin = COUNTS + self.width
        return self.values[begin : begin + self.count]

    @property
    def tree(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens and parents of the verified tree, and the accepted path through it."""
        begin = COUNTS + 2 * self.width
        size = (len(self.values) - begin) // 2
        tokens, parents = self.values[begin : begin + size], self.values[begin + size :]
        path = self.values[begin - self.width : begin - self.width + min(self.count, self.drafted) + 1]
        real = [node for node, parent in enumerate(parents) if parent >= 0]  # a common budget drops nodes anywhere
        place = {node: at for at, node in enumerate(real)}
        return [tokens[node] for node in real], [place[parents[node]] for node in real], [place[node] for node in path]
