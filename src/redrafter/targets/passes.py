"""What runs passes of a target for the running batch, and the pass by the model's own attention."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece
from redrafter.core.step import Verifier
from redrafter.core.transfer import padded, put
from redrafter.core.tree import Tree
from redrafter.targets.target import Target


class Pass(Verifier, Protocol):
    """A way to run a target on a KV cache whose layers are there for all rows."""

    @property
    def target(self) -> Target:
        """The target that it runs."""

    @property
    def flat(self) -> "FlatPass | None":
        """The same, if it takes any mixture of trees and pieces of prompts at once."""

    @property
    def same_bits(self) -> bool | None:
        """Whether a token's logits have the same bits in every pass; None if nobody tried."""

    def read(self, pieces: Sequence[Piece], cache: KVCache, layers: tuple[int, ...]) -> list[Tensor]:
        """Read pieces of prompts of different rows -> the hidden states (n, C) of each."""

    def score(self, piece: Piece, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Read one piece -> logits (n, V) and hidden states (n, C) of all of its tokens."""


class FlatPass(Pass, Protocol):
    """A pass over lines (`core.flat`). It can be recorded, and trees can be verified beside pieces of prompts."""

    @property
    def longest(self) -> int:
        """The last position that exists."""

    @property
    def fused(self) -> bool:
        """Whether kernels alone write to the KV cache, so that a dry run writes nothing."""

    def run(
        self, flat: Flat, cache: KVCache, layers: tuple[int, ...], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass over T tokens -> logits (T or len(wanted), V), hidden states (T, C).

        `wanted` are the lines whose logits are wanted, by default all.
        """


class PaddedPass:
    """The model's own attention: rows × nodes, and prompts apart from trees."""

    flat = None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.same_bits: bool | None = target.same_bits

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return self.target.verify(tree, lengths, cache, layers)

    def read(self, pieces: Sequence[Piece], cache: KVCache, layers: tuple[int, ...]) -> list[Tensor]:
        """Several whole beginnings of prompts share a pass, padded, in a cache apart that is placed afterwards."""
        sizes = [len(piece.tokens) for piece in pieces]
        tokens = padded([piece.tokens for piece in pieces], self.target.device)
        if len(pieces) == 1:
            (piece,) = pieces
            part = cache.part(piece.place, piece.place + 1)
            _, hidden = self.target.prefill(tokens, sizes, part, layers, piece.begin)
        elif any(piece.begin for piece in pieces):
            return [hidden for piece in pieces for hidden in self.read([piece], cache, layers)]
        else:
            apart = KVCache(slots=max(sizes))
            _, hidden = self.target.prefill(tokens, sizes, apart, layers)
            cache.place(apart, put([piece.place for piece in pieces], tokens.device))
        return [own[:size] for own, size in zip(hidden, sizes, strict=True)]

    def score(self, piece: Piece, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        device, part = self.target.device, cache.part(piece.place, piece.place + 1)
        every = torch.arange(len(piece.tokens), device=device)
        (logits,), (hidden,) = self.target.read(put([piece.tokens], device), piece.begin, part, layers, every)
        return logits, hidden
