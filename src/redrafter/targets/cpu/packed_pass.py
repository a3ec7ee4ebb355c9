"""The pass of packed weights, as the running batch uses it: prompts of any rows share passes, with trees too."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece
from redrafter.core.tree import Tree
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.passes import PaddedPass, Pass
from redrafter.targets.target import Target


class PackedPass(PaddedPass):
    """Trees of any depth and pieces of prompts, without padding."""

    target: PackedTarget

    def read(self, pieces: Sequence[Piece], cache: KVCache, layers: tuple[int, ...]) -> list[Tensor]:
        return divided(self.target.read_pieces(pieces, cache, layers), pieces)


def own_pass(target: Target) -> Pass:
    """The pass by the target's own attention, which takes any mixture if it has packed weights."""
    return PackedPass(target) if isinstance(target, PackedTarget) else PaddedPass(target)


class ReadsBeside:
    """`core.step.Verifier` for one step: its pass also reads pieces of prompts, of other rows too.

    cache: of all rows; those of the tree come first. keep: takes the pieces' hidden states.
    """

    def __init__(
        self,
        verifier: PackedPass,
        cache: KVCache,
        pieces: Sequence[Piece],
        keep: Callable[[Sequence[Piece], Sequence[Tensor]], None],
    ) -> None:
        self.target, self.cache, self.pieces, self.keep = verifier.target, cache, pieces, keep

    def verify(
        self,
        tree: Tree,
        lengths: Tensor,
        cache: KVCache,  # noqa: ARG002
        layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        logits, hidden, states = self.target.verify_and_read(tree, lengths, self.cache, layers, self.pieces)
        self.keep(self.pieces, divided(states, self.pieces))
        return logits, hidden


def divided(states: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The hidden states of each piece."""
    return list(torch.split(states, [len(piece.tokens) for piece in pieces]))
