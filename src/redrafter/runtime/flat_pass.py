"""The pass of recorded steps: one recording for each number of tokens, whatever they are.

The trees of all rows come first in a pass, pieces of prompts behind them. All passes share one table of lines, into
which a step's draft writes trees and the host writes pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.core.flat import Flat, Piece, of_pieces, put_trees
from redrafter.core.step import Rows
from redrafter.core.transfer import put
from redrafter.core.tree import Tree
from redrafter.kernels import compile_kernels
from redrafter.kernels.tree_attention.naive import PLACE, SLOT
from redrafter.runtime.graph import Replays, new_memory, recorded, unrecorded
from redrafter.runtime.state import BatchState
from redrafter.targets.passes import FlatPass, Pass

MOST = 512
"""Prompt tokens that a recorded pass reads at most."""
LEAST, STEP = 32, 128
"""Tokens of the smallest pass with pieces of prompts, and of what larger passes are a multiple of."""
AT_ONCE = 8
"""Pieces of prompts in one pass."""


def padded_size(tokens: int) -> int:
    """Tokens of the pass for so many: products of other numbers take longer than those of the next number here.

    >>> [padded_size(n) for n in (1, 3, 64, 65, 129, 257, 500)]
    [1, 4, 64, 128, 256, 384, 512]
    """
    return 1 << (tokens - 1).bit_length() if tokens <= 2 * STEP else -(-tokens // STEP) * STEP


@dataclass(frozen=True)
class Outputs:
    """What passes leave for the end of a step. It stays in place."""

    logits: Tensor  # (T, V)
    hidden: Tensor  # (T, C)


class FlatPasses:
    """Flat passes, each recorded at its first use. One step at a time uses them."""

    def __init__(self, verifier: FlatPass, state: BatchState, layers: tuple[int, ...], most: int) -> None:
        """`most`: lines of trees in a pass."""
        self.verifier, self.state, self.layers = verifier, state, layers
        device = verifier.target.device
        self.memory = new_memory(device)  # of its own: a pass runs between the parts of a step, which keep results
        self.flat = Flat.empty(padded_size(most + MOST), AT_ONCE + state.places, device)
        self.places = torch.arange(state.places, device=device)
        self.outputs: dict[int, Outputs] = {}
        self.graphs: dict[tuple[int, int, int], Replays] = {}  # by lines of trees, all lines, and rows
        self.kept: list[Any] = []  # what the graphs read: a graph does not keep it

    def room(self, area: int) -> Outputs:
        """The results of passes with this many lines of trees."""
        if area not in self.outputs:
            target = self.verifier.target
            width = len(self.layers) * target.hidden_size
            self.outputs[area] = Outputs(
                torch.zeros(area, target.vocab_size, dtype=target.dtype, device=target.device),
                torch.zeros(area, width, dtype=target.dtype, device=target.device),
            )
        return self.outputs[area]

    def size(self, trees: int, pieces: Sequence[Piece]) -> int:
        """Tokens of the pass over so many lines of trees and over pieces of prompts."""
        read = sum(len(piece.tokens) for piece in pieces)
        assert read <= MOST, "more tokens of prompts than a pass has room for"
        return max(LEAST, padded_size(trees + read)) if pieces else padded_size(trees)

    def run(self, area: int, trees: int, rows: int, pieces: Sequence[Piece]) -> None:
        """A pass over the trees that were packed, of this many rows, and over pieces of prompts.

        area: the most lines that the trees of such steps have; these have `trees`.
        """
        device, size = self.verifier.target.device, self.size(trees, pieces)
        if pieces:
            read = of_pieces(pieces, self.verifier.longest, size - trees, AT_ONCE)
            read.runs[:, 0] += trees
            self.flat.lines[trees:size] = put(read.lines, device)
            self.flat.runs[:AT_ONCE] = put(read.runs, device)
        self.graph(area, size, rows, bool(pieces)).replay()

    def clear(self) -> None:
        """Nothing but padding in all lines, so that a pass of any size can be recorded."""
        self.flat.lines.copy_(Flat.empty(len(self.flat.lines), 0, self.places.device).lines)
        self.flat.runs.zero_()

    def sizes(self, lines: Sequence[int], most: int) -> list[int]:
        """All sizes of passes that read up to so many prompt tokens beside trees of so many `lines`."""
        return sorted({max(LEAST, padded_size(n)) for n in range(min(lines) + 1, max(lines) + most + 1)})

    def graph(self, area: int, size: int, rows: int, reads: bool) -> Replays:
        """The pass of this size, recorded at its first use; `reads`: with pieces behind the lines of trees."""
        key = (area, size, rows if reads else -rows)
        if key not in self.graphs:
            try:
                self.graphs[key] = self._record(*key[:2], rows, reads)
            except BaseException:
                self.memory = new_memory(self.places.device)
                raise
        return self.graphs[key]

    def _record(self, area: int, size: int, rows: int, reads: bool) -> Replays:
        """Passes before the recording write what the recorded one will write again."""
        runs = self.flat.runs[0 if reads else AT_ONCE : AT_ONCE + rows]
        flat = Flat(self.flat.lines[:size], runs)
        wanted, outputs = torch.arange(min(area, size), device=flat.lines.device), self.room(area)
        verifier, layers, history, cache = self.verifier, self.layers, self.state.history, self.state.cache

        def run() -> None:
            logits, hidden = verifier.run(flat, cache, layers, wanted)
            outputs.logits[: len(logits)].copy_(logits)
            outputs.hidden[: len(logits)].copy_(hidden[: len(logits)])
            if hidden.shape[1]:  # padding's slot is -1: the last slot is no token's
                history[flat.lines[:, PLACE], flat.lines[:, SLOT]] = hidden

        with verifier.target.timed("record the passes"):
            if verifier.fused:  # other layers would write keys of no meaning to the KV cache
                compile_kernels(run, flat.lines.device)
            (graph,) = recorded([run], self.memory) if flat.lines.is_cuda else unrecorded([run])
        self.kept.append((flat, wanted))
        return graph


class FlatStepPass:
    """How a kind of step uses flat passes: `recorded_step.StepPass`."""

    actions: Sequence[Callable[[], None]] = ()

    def __init__(self, passes: FlatPasses, rows: int, area: int) -> None:
        """area: the most lines of trees."""
        self.passes, self.rows, self.area = passes, rows, area
        self.outputs = passes.room(area)

    def pack(self, tree: Tree, rows: Rows) -> Tensor:
        passes = self.passes
        flat = Flat(passes.flat.lines[: padded_size(self.area)], passes.flat.runs[AT_ONCE : AT_ONCE + self.rows])
        real = tree.valid & ~rows.done[:, None]
        return put_trees(flat, tree, real, rows.lengths, passes.places[: self.rows], passes.verifier.longest)

    def results(self, at: Tensor) -> tuple[Tensor, Tensor]:
        at = at.clamp(max=self.area - 1)  # a row without a line has no results
        return self.outputs.logits[at], self.outputs.hidden[at]

    def record(self, graphs: Sequence[Replays], trees: int | None) -> None:  # noqa: ARG002
        """The pass of nothing but trees. It writes behind the rows' ends."""
        self.passes.graph(self.area, self.size(trees, ()), self.rows, reads=False)

    def size(self, trees: int | None, pieces: Sequence[Piece]) -> int:
        return self.passes.size(self.area if trees is None else trees, pieces)

    def ready(self, trees: int | None, pieces: Sequence[Piece]) -> bool:
        return (self.area, self.size(trees, pieces), self.rows if pieces else -self.rows) in self.passes.graphs

    def prepare(self, trees: int | None, pieces: Sequence[Piece]) -> None:
        if not self.ready(trees, pieces):
            self.passes.clear()
            self.passes.graph(self.area, self.size(trees, pieces), self.rows, bool(pieces))

    def run(self, trees: int | None, pieces: Sequence[Piece]) -> None:
        self.passes.run(self.area, self.area if trees is None else trees, self.rows, pieces)


class PaddedStepPass:
    """The same by a pass that takes trees alone, where the tree kernel does not run the model: no pieces."""

    tree: Tree
    found: tuple[Tensor, Tensor]
    graph: Replays

    def __init__(self, verifier: Pass, state: BatchState, rows: Rows, layers: tuple[int, ...]) -> None:
        self.verifier, self.history, self.rows, self.layers = verifier, state.history, rows, layers
        self.cache = state.cache.part(0, len(rows.last))

    @property
    def actions(self) -> list[Callable[[], None]]:
        """What is recorded with the step, between its other parts."""
        return [self._verify]

    def pack(self, tree: Tree, rows: Rows) -> Tensor:  # noqa: ARG002
        self.tree = tree
        return tree.depths

    def results(self, at: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.found

    def record(self, graphs: Sequence[Replays], trees: int | None) -> None:  # noqa: ARG002
        self.graph = graphs[-2]

    def size(self, trees: int | None, pieces: Sequence[Piece]) -> int:  # noqa: ARG002
        return self.tree.tokens.numel()

    def ready(self, trees: int | None, pieces: Sequence[Piece]) -> bool:  # noqa: ARG002
        return True

    def prepare(self, trees: int | None, pieces: Sequence[Piece]) -> None:
        """It is recorded with the step."""

    def _verify(self) -> None:
        lengths, done = self.rows.lengths[:, None], self.rows.done[:, None]
        self.found = _, hidden = self.verifier.verify(self.tree, self.rows.lengths, self.cache, self.layers)
        if hidden.shape[2]:
            batch, n, _ = hidden.shape
            slots = torch.where(done, self.history.shape[1] - 1, lengths + torch.arange(n, device=hidden.device))
            self.history[torch.arange(batch, device=hidden.device)[:, None], slots] = hidden

    def run(self, trees: int | None, pieces: Sequence[Piece]) -> None:  # noqa: ARG002
        assert not pieces
        self.graph.replay()
