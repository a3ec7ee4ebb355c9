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
        """The tree without guesses that cannot be accepted and with tokens that are certain; at most `room` nodes."""


class RowProcessors:
    """Each row's processor on its own nodes. An error ends that row alone."""

    def __init__(self, rows: Sequence[Row | None], room: int = 0) -> None:
        self.rows, self.room = rows, room

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        result = logits.clone()
        for i, row in enumerate(self.rows):
            if row is None or row.processor is None or row.error is not None:
                continue
            try:
                own = torch.tensor([i], device=logits.device)
                result[i] = row.processor(logits[i : i + 1], keep_rows(tree, own))[0]
            except Exception as error:
                row.error = error
        return result

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


def planted(rows: Sequence[Branches], device: torch.device) -> Tree:
    """The rows' trees as tensors, each in depth order and filled up with empty nodes below the root.

    >>> tree = planted([Branches([7, 8, 9, 5], [0, 0, 1, 0]), Branches([7], [0])], torch.device("cpu"))
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.valid.sum(1).tolist()
    ([[7, 8, 5, 9], [7, 7, 7, 7]], [[0, 0, 0, 1], [0, 0, 0, 0]], [[0, 1, 1, 2], [0, 1, 1, 1]], [4, 1])
    """
    size = max(len(row.tokens) for row in rows)
    columns: list[list[list[int]]] = [[], [], [], []]
    for row in rows:
        depths = [0]
        for parent in row.parents[1:]:
            depths.append(depths[parent] + 1)
        order = sorted(range(len(depths)), key=lambda node: depths[node])
        place = {node: at for at, node in enumerate(order)}
        empty = size - len(order)
        for column, values in zip(
            columns,
            (
                [row.tokens[node] for node in order] + [row.tokens[0]] * empty,
                [place[row.parents[node]] for node in order] + [0] * empty,
                [depths[node] for node in order] + [1] * empty,
                [1] * len(order) + [0] * empty,
            ),
            strict=True,
        ):
            column.append(values)
    tokens, parents, depths_, valid = (torch.tensor(column, device=device) for column in columns)
    length = max(max(row) for row in columns[2])
    return Tree(tokens, parents, depths_, valid > 0, ancestors(parents, length), length=length)


class Constraint(Protocol):
    """What the text of a request must follow, such as a compiled grammar."""

    def guide(self, ids: Callable[[], list[int]], before: Processor | None) -> Guide:
        """The guide of one row. `ids` are its prompt and all decided tokens; `before` changes the logits first."""
