"""Rows whose texts are constrained: their logits, and the trees that are guessed for them.

A logits processor changes what a row may choose at each node. A guide is a processor that also knows which guesses are
in vain and which tokens are certain, such as a grammar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from redrafter.core.rows import keep_rows
from redrafter.core.sampling import Processor
from redrafter.core.tree import Tree, ancestors
from redrafter.runtime.row import Row


@dataclass(frozen=True)
class Branches:
    """One row's tree on the host: the root first, parents before their children."""

    tokens: list[int]
    parents: list[int]  # indices; the root is its own parent


@runtime_checkable
class Guide(Protocol):
    """A row's logits processor with an opinion about guesses."""

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor: ...

    def guess(self, tree: Branches, room: int) -> Branches:
        """The tree without guesses that cannot be accepted and with tokens that are certain, in depth order.

        It has at most `room` nodes besides the root. The next call is about this tree.
        """


class RowProcessors:
    """Each row's processor on its own nodes, which it may change in place. An error ends that row alone."""

    def __init__(self, rows: Sequence[Row | None], room: int = 0) -> None:
        self.rows, self.room = rows, room

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        for i, row in enumerate(self.rows):
            if row is None or row.processor is None or row.error is not None:
                continue
            try:
                there = logits[i : i + 1]
                made = row.processor(there, keep_rows(tree, slice(i, i + 1)))
                if made is not there:
                    there.copy_(made)
            except Exception as error:
                row.error = error
        return logits

    def guess(self, tree: Tree) -> Tree:
        """The tree with each guide's changes. A sampled tree stays as it is: its rule needs every draw."""
        guides = [None if row is None or row.error is not None else row.processor for row in self.rows]
        if tree.draft_logits is not None or not any(isinstance(guide, Guide) for guide in guides):
            return tree
        made: list[Branches] = []
        valid, tokens, parents = tree.valid.sum(1).tolist(), tree.tokens.tolist(), tree.parents.tolist()
        for row, guide, n, own, above in zip(self.rows, guides, valid, tokens, parents, strict=True):
            branches = Branches(own[:n], above[:n])
            if row is not None and isinstance(guide, Guide):
                try:
                    branches = guide.guess(branches, self.room)
                except Exception as error:
                    row.error = error
            made.append(branches)
        return planted(made, tree.tokens.device)


def row_processor(rows: Sequence[Row | None], room: int = 0) -> Processor | None:
    """The processors of these rows; None if no row has one. Guides may plant `room` nodes."""
    return RowProcessors(rows, room) if any(row is not None and row.processor is not None for row in rows) else None


def depths_of(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def by_depth(tree: Branches) -> Branches:
    """The same tree in the order of `core.tree.Tree`.

    >>> by_depth(Branches([7, 8, 9, 5], [0, 0, 1, 0]))
    Branches(tokens=[7, 8, 5, 9], parents=[0, 0, 0, 1])
    """
    depths = depths_of(tree.parents)
    order = sorted(range(len(depths)), key=lambda node: depths[node])
    place = {node: at for at, node in enumerate(order)}
    return Branches([tree.tokens[node] for node in order], [place[tree.parents[node]] for node in order])


def planted(rows: Sequence[Branches], device: torch.device) -> Tree:
    """The rows' trees, each in depth order, as tensors; shorter ones are filled up with empty nodes below the root.

    >>> tree = planted([Branches([7, 8, 5, 9], [0, 0, 0, 1]), Branches([7], [0])], torch.device("cpu"))
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.valid.sum(1).tolist()
    ([[7, 8, 5, 9], [7, 7, 7, 7]], [[0, 0, 0, 1], [0, 0, 0, 0]], [[0, 1, 1, 2], [0, 1, 1, 1]], [4, 1])
    """
    size = max(len(row.tokens) for row in rows)
    empty = [size - len(row.tokens) for row in rows]
    depths = [depths_of(row.parents) + [1] * n for row, n in zip(rows, empty, strict=True)]
    tokens, parents, valid = (
        torch.tensor(column, device=device)
        for column in (
            [row.tokens + row.tokens[:1] * n for row, n in zip(rows, empty, strict=True)],
            [row.parents + [0] * n for row, n in zip(rows, empty, strict=True)],
            [[True] * (size - n) + [False] * n for n in empty],
        )
    )
    length = max(max(row) for row in depths)
    return Tree(tokens, parents, torch.tensor(depths, device=device), valid, ancestors(parents, length), length=length)


class Constraint(Protocol):
    """What the text of a request must follow, such as a compiled grammar."""

    def guide(self, ids: Callable[[], list[int]], before: Processor | None) -> Guide:
        """The guide of one row. `ids` are its prompt and all decided tokens; `before` changes the logits first."""
