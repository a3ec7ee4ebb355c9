"""Rows whose texts are constrained: their logits, and the trees that are guessed for them.

A logits processor changes what a row may choose at each node. A guide is a processor that also knows which guesses are
in vain and which tokens are certain, such as a grammar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrafter.core.rows import keep_rows
from redrafter.core.sampling import Processor
from redrafter.core.tree import Tree, ancestors
from redrafter.kernels.tree_attention.naive import DEEPEST as DEEPEST
from redrafter.runtime.row import Row


@dataclass(frozen=True)
class Branches:
    """One row's tree on the host: the root first, parents before their children."""

    tokens: list[int]
    parents: list[int]  # indices; the root is its own parent


@runtime_checkable
class Guide(Protocol):
    """A row's logits processor that only forbids tokens, and knows which guesses are in vain."""

    before: Processor | None  # a processor that changes the logits first

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor: ...

    def guess(self, tree: Branches, room: int) -> Branches:
        """The tree without guesses that cannot be accepted and with tokens that are certain, in depth order.

        It has at most `room` nodes besides the root, and no certain token deeper than `DEEPEST`. The next call, of the
        guide or of `mask`, is about this tree.
        """

    def mask(self, tree: Branches, words: NDArray[np.int32]) -> None:
        """Write into `words` (N+1, V/32) which tokens may follow each node: a bit for each, the lowest first."""

    def check(self) -> None:
        """Raise if the text has a token that may not follow: none that may was left to choose."""


class RowProcessors:
    """Each row's processor on its own nodes, which it may change in place. An error ends that row alone."""

    def __init__(self, rows: Sequence[Row | None], room: int = 0) -> None:
        self.rows, self.room = rows, room

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        def process(i: int, processor: Processor) -> None:
            there = logits[i : i + 1]
            made = processor(there, keep_rows(tree, slice(i, i + 1)))
            if made is not there:
                there.copy_(made)

        self._each(process)
        return logits

    def guess(self, tree: Tree, guesses: Sequence[bool]) -> Tree:
        """The tree with each guide's changes. A sampled tree stays as it is: its rule needs every draw."""
        if tree.draft_logits is not None or not any(
            row is not None and isinstance(row.processor, Guide) for row in self.rows
        ):
            return tree
        sizes, tokens, parents = tree.valid.sum(1).tolist(), tree.tokens.tolist(), tree.parents.tolist()
        drafted = [Branches(t[:n], p[:n]) for t, p, n in zip(tokens, parents, sizes, strict=True)]
        return planted(self.guessed(drafted, self.room, guesses), tree.tokens.device)

    def guessed(self, trees: Sequence[Branches], room: int, guesses: Sequence[bool]) -> list[Branches]:
        """The rows' trees with each guide's changes, in rows that guess."""
        changed = list(trees)

        def change(i: int, processor: Processor) -> None:
            if isinstance(processor, Guide) and guesses[i]:
                changed[i] = processor.guess(changed[i], room)

        self._each(change)
        return changed

    def mask(self, trees: Sequence[Branches], words: NDArray[np.int32]) -> None:
        """Write into (B, N+1, V/32) what may follow each node of these trees; anything in rows without a guide."""
        words[:] = -1

        def fill(i: int, processor: Processor) -> None:
            if isinstance(processor, Guide):
                processor.mask(trees[i], words[i])

        self._each(fill)

    def _each(self, work: Callable[[int, Processor], None]) -> None:
        for i, row in enumerate(self.rows):
            if row is not None and row.processor is not None and row.error is None:
                try:
                    work(i, row.processor)
                except Exception as error:
                    row.error = error


def recordable(row: Row) -> bool:
    """Whether the row's steps can be recorded: a processor that computes with logits runs on the host."""
    return row.processor is None or (isinstance(row.processor, Guide) and row.processor.before is None)


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


def columns(rows: Sequence[Branches], size: int) -> list[list[list[int]]]:
    """Tokens, parents, depths and valid nodes of the rows' trees, each in depth order.

    Smaller trees are filled up to `size` nodes with empty ones below the root.

    >>> columns([Branches([7, 8, 5, 9], [0, 0, 0, 1]), Branches([7], [0])], 4)[1:3]
    [[[0, 0, 0, 1], [0, 0, 0, 0]], [[0, 1, 1, 2], [0, 1, 1, 1]]]
    """
    made: list[list[list[int]]] = [[], [], [], []]
    for row in rows:
        real = len(row.tokens)
        empty = size - real
        tokens, parents, depths, valid = made
        tokens.append(row.tokens + row.tokens[:1] * empty)
        parents.append(row.parents + [0] * empty)
        depths.append(depths_of(row.parents) + [1] * empty)
        valid.append([1] * real + [0] * empty)
    return made


def planted(rows: Sequence[Branches], device: torch.device) -> Tree:
    """The rows' trees, each in depth order, as tensors.

    >>> tree = planted([Branches([7, 8, 5, 9], [0, 0, 0, 1]), Branches([7], [0])], torch.device("cpu"))
    >>> tree.tokens.tolist(), tree.valid.sum(1).tolist(), tree.length
    ([[7, 8, 5, 9], [7, 7, 7, 7]], [4, 1], 2)
    """
    made = columns(rows, max(len(row.tokens) for row in rows))
    tokens, parents, depths, valid = torch.tensor(made, device=device)
    length = max(max(row) for row in made[2])
    return Tree(tokens, parents, depths, valid > 0, ancestors(parents, length), length=length)


def forbidden(words: Tensor, vocab_size: int) -> Tensor:
    """(..., V/32) int32, a bit for each allowed token, the lowest first -> (..., V) bool, true for all others.

    >>> forbidden(torch.tensor([[5]], dtype=torch.int32), 4).tolist()
    [[False, True, False, True]]
    """
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :vocab_size] == 0


class Constraint(Protocol):
    """What the text of a request must follow, such as a compiled grammar."""

    def guide(self, ids: Callable[[], list[int]], before: Processor | None) -> Guide:
        """The guide of one row. `ids` are its prompt and all decided tokens; `before` changes the logits first."""
