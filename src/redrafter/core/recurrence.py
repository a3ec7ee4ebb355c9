"""Recurrent memory: what a layer keeps of a text beside keys and values, one state for each row.

A state is a set of tensors, such as the matrix of a linear attention or the last inputs of a convolution. It is a
function of the state before it and of one token. So a node of a tree has the state of its own path: a tree is run level
by level, all nodes of one depth together, each from its parent's state. The state of the last accepted node is the
row's next state. What a layer computes is not known here: a `Runner` advances states over tokens.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

States = dict[Hashable, Tensor]
"""The tensors of a layer's state, whose first axis is rows."""


class Runner(Protocol):
    """Advances m states of a layer over t tokens each, and keeps the layer's outputs."""

    def __call__(self, rows: Tensor, columns: Tensor, states: States | None) -> States:
        """The tokens of a pass at `rows` (m,) and `columns` (m, t) -> the states behind them.

        None: no text comes before. The given states may be overwritten.
        """


@dataclass(frozen=True)
class Level:
    """Nodes of one depth: their rows and columns (m,), and their parents' columns; None for roots.

    first: roots before which there is no text.
    """

    rows: Tensor
    columns: Tensor
    parents: Tensor | None
    first: bool = False


@dataclass(frozen=True)
class TreePass:
    """A pass over trees, level by level, roots first."""

    levels: Sequence[Level]
    width: int  # columns of the pass


@dataclass(frozen=True)
class TextPass:
    """A pass over the next tokens of each row, behind its first `begin`.

    counts: how many tokens of the pass each row has; the others are padding.
    """

    counts: Sequence[int]
    begin: int

    def groups(self, device: torch.device) -> Iterator[tuple[Tensor, int]]:
        """Rows that have equally many tokens, and how many."""
        for count in sorted(set(self.counts) - {0}):
            yield torch.tensor([row for row, n in enumerate(self.counts) if n == count], device=device), count


@dataclass
class RecurrentMemory:
    """The committed states of all layers, and those of the nodes of the trees under verification."""

    layers: dict[Hashable, States] = field(default_factory=dict)  # (B, ...) each
    nodes: dict[Hashable, States] = field(default_factory=dict)  # (B, N+1, ...) each, until the next commit

    def run_tree(self, layer: Hashable, trees: TreePass, rows: int, runner: Runner) -> None:
        """Run a layer over the trees of so many rows. Committed states stay until `commit`."""
        self.nodes.pop(layer, None)
        for level in trees.levels:
            states = None
            if level.parents is not None:
                states = _take(self.nodes[layer], level.rows, level.parents)
            elif not level.first:
                states = _take(self.layers[layer], level.rows)
            states = runner(level.rows, level.columns[:, None], states)
            if layer not in self.nodes:
                self.nodes[layer] = {name: x.new_zeros(rows, trees.width, *x.shape[1:]) for name, x in states.items()}
            _put(self.nodes[layer], states, level.rows, level.columns)

    def run_text(
        self, layer: Hashable, text: TextPass, device: torch.device, runner: Runner, together: bool = True
    ) -> None:
        """Run a layer over texts, and commit the states behind them.

        together: the runner goes on from a state over several tokens at once, not only from a text's beginning.
        """
        for rows, count in text.groups(device):
            states = _take(self.layers[layer], rows) if text.begin else None
            size = count if together or states is None else 1
            for start in range(0, count, size):
                columns = torch.arange(start, start + size, device=device)
                states = runner(rows, columns.expand(len(rows), -1), states)
            assert states is not None
            self._room(layer, states, len(text.counts))
            _put(self.layers[layer], states, rows)

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Take in the first `count` (B,) nodes of the paths (B, L+1); a row with none keeps its state."""
        rows = torch.arange(len(path), device=path.device)
        last = path[rows, (count - 1).clamp(min=0)]
        for layer, states in self.nodes.items():
            self._room(layer, {name: x[:, 0] for name, x in states.items()}, len(path))
            for name, new in _take(states, rows, last).items():
                old = self.layers[layer][name]
                taken = (count > 0).to(old.device).view(-1, *[1] * (old.dim() - 1))
                old.copy_(torch.where(taken, new, old))
        self.nodes.clear()

    def _room(self, layer: Hashable, like: States, rows: int) -> None:
        if layer not in self.layers:
            self.layers[layer] = {name: x.new_zeros(rows, *x.shape[1:]) for name, x in like.items()}

    def tensors(self) -> Iterator[Tensor]:
        for states in self.layers.values():
            yield from states.values()

    def part(self, start: int, stop: int) -> "RecurrentMemory":
        """Rows start..stop-1 of all layers, in the same memory."""
        return RecurrentMemory({layer: {k: x[start:stop] for k, x in s.items()} for layer, s in self.layers.items()})

    def place(self, other: "RecurrentMemory", rows: Tensor) -> None:
        """Copy the rows of another memory into `rows` of this one."""
        for layer, states in other.layers.items():
            _put(self.layers[layer], states, rows)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.layers = {layer: _take(states, rows) for layer, states in self.layers.items()}

    def snapshot(self, row: int) -> "RecurrentMemory":
        """A copy of one row."""
        one = self.part(row, row + 1).layers
        return RecurrentMemory(
            {layer: {name: x.clone() for name, x in states.items()} for layer, states in one.items()}
        )

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors())


def _take(states: States, *index: Tensor) -> States:
    """Copies of some states; the layers of a model may lie on several devices."""
    return {name: x[tuple(i.to(x.device) for i in index)] for name, x in states.items()}


def _put(states: States, new: States, *index: Tensor) -> None:
    for name, x in states.items():
        x[tuple(i.to(x.device) for i in index)] = new[name]
