"""A flat pass: tokens of any mixture of rows, one line each. Trees, plain rows and pieces of prompts share it.

The format of a line is in `kernels/tree_attention/naive.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.tree import Tree
from redrafter.kernels.flatten import flatten
from redrafter.kernels.flatten.host import lines_of
from redrafter.kernels.tree_attention.naive import (
    EVERYTHING,
    INDEX,
    NEWEST,
    PLACE,
    POSITION,
    SLOT,
    SLOTS,
    TOKEN,
    WINDOW,
    padding,
)

POWER = 0.85
"""What is said of an edge to this power is how often it is accepted: it fits what trained drafters say."""
MOST = 0.98
"""No guess is thought to be more certain."""


@dataclass(frozen=True)
class Flat:
    """T tokens of one pass. Lines that are in no run are padding."""

    lines: Tensor  # (T, COLUMNS)
    runs: Tensor  # (R, 2) the first line of each row's tokens, and how many there are; a row may have none

    @property
    def tokens(self) -> Tensor:
        return self.lines[:, TOKEN]

    @property
    def positions(self) -> Tensor:
        return self.lines[:, POSITION]

    @classmethod
    def empty(cls, tokens: int, runs: int, device: torch.device | str, newest: int = NEWEST) -> "Flat":
        """Room for this many tokens and runs: nothing but padding."""
        return cls(padding(tokens, device, newest), torch.zeros(runs, 2, dtype=torch.long, device=device))


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one row's prompt."""

    place: int  # of the row in the KV cache
    begin: int  # tokens of the prompt before the piece
    tokens: Sequence[int]


def of_pieces(
    pieces: Sequence[Piece], longest: int, tokens: int | None = None, runs: int | None = None, newest: int = NEWEST
) -> Flat:
    """The pieces one behind the other, on the host, with padding up to `tokens` lines and `runs` runs.

    >>> flat = of_pieces([Piece(3, 4, [8, 9]), Piece(0, 0, [7])], longest=100, tokens=4)
    >>> flat.tokens.tolist(), flat.positions.tolist(), flat.runs.tolist()
    ([8, 9, 7, 0], [4, 5, 0, 0], [[0, 2], [2, 1]])
    """
    count = sum(len(piece.tokens) for piece in pieces)
    flat = Flat.empty(count if tokens is None else tokens, len(pieces) if runs is None else runs, "cpu", newest)
    first = 0
    for run, piece in zip(flat.runs, pieces, strict=False):
        size = len(piece.tokens)
        lines = flat.lines[first : first + size]
        index = torch.arange(piece.begin, piece.begin + size)
        lines[:, TOKEN] = torch.as_tensor(piece.tokens)
        lines[:, POSITION] = index.clamp(max=longest)
        lines[:, INDEX] = lines[:, SLOT] = index
        lines[:, WINDOW], lines[:, PLACE] = EVERYTHING, piece.place
        lines[:, SLOTS:] = (index[:, None] + torch.arange(1 - newest, 1)).clamp(min=-1)
        run[0], run[1] = first, size
        first += size
    return flat


def put_trees(
    flat: Flat, tree: Tree, real: Tensor, lengths: Tensor, places: Tensor, longest: int, begin: int = 0, run: int = 0
) -> Tensor:
    """Write the `real` (B, N+1) nodes of trees into a pass, from line `begin` and run `run` on.

    Returns the line of each node (B, N+1); for a dropped node that of its root.
    """
    runs = flat.runs[run : run + len(lengths)]
    return flatten(tree.tokens, tree.depths, tree.mask, real, lengths, places, longest, flat.lines, runs, begin)


def on_host(tree: Tree, lengths: Tensor, longest: int, pieces: Sequence[Piece] = ()) -> tuple[Tensor, int]:
    """Lines of trees of the rows at the first places, then of pieces of prompts; and how many lines the trees have.

    For a CPU: no line is padding, and each has as many newest keys as the deepest node needs.
    """
    newest = max(NEWEST, tree.length)
    lines = lines_of(tree.tokens, tree.depths, tree.mask, tree.valid, lengths, longest, newest)
    count = lines.shape[0]
    return torch.cat([lines, of_pieces(pieces, longest, newest=newest).lines]) if pieces else lines, count


def of_trees(tree: Tree, lengths: Tensor, longest: int, places: Tensor | None = None) -> tuple[Flat, Tensor]:
    """The trees of all rows as a pass, and the line of each node (B, N+1). Empty nodes are dropped."""
    batch, n = tree.tokens.shape
    flat = Flat.empty(batch * n, batch, lengths.device)
    if places is None:
        places = torch.arange(batch, device=lengths.device)
    return flat, put_trees(flat, tree, tree.valid, lengths, places, longest)


def ranks(tree: Tree, scores: Tensor) -> Tensor:
    """(B, N+1) the place of each drafted node among those of all rows, the most probable first; behind them the rest.

    A node's score (B, N+1) is never above its parent's, and parents come first among equal scores: the first nodes of
    this order, however many, are closed under parents.
    """
    drafted = tree.valid & (tree.depths > 0)
    order = scores.masked_fill(~drafted, -torch.inf).T.flatten()  # node by node: equal scores keep the order of depths
    best = order.sort(descending=True, stable=True).indices
    place = torch.empty_like(best).scatter_(0, best, torch.arange(len(best), device=best.device))
    return place.view(tree.tokens.shape[::-1]).T


def budgeted(tree: Tree, place: Tensor, nodes: int | Tensor) -> Tensor:
    """The most probable `nodes` drafted nodes of all rows by their `ranks`, and the roots -> (B, N+1) bool."""
    return tree.valid & ((place < nodes) | (tree.depths == 0))


def promised(tree: Tree, scores: Tensor, place: Tensor, budgets: Tensor) -> Tensor:
    """(B, K) how many nodes of each row should be accepted with each of the budgets (K,) of all rows."""
    likely = (POWER * scores.float()).exp().nan_to_num(0.0).minimum(MOST**tree.depths)
    chosen = (place[:, :, None] < budgets) & (tree.valid & (tree.depths > 0))[:, :, None]
    return (likely[:, :, None] * chosen).sum(1)
