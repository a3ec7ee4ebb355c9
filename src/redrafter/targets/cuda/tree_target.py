"""A target that runs flat passes with the tree attention kernel: every key is read once, and no mask is long.

In its passes the model runs with the kernel as its attention, stacked linear layers, and fused or compiled
layers. Between them the model has its own modules again; its parameters stay stacked until `Target.release`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, of_pieces, of_trees
from redrafter.core.transfer import put
from redrafter.core.tree import Tree
from redrafter.errors import UnsupportedTarget
from redrafter.targets.cuda.fused_qkv import replaced, stack_linears
from redrafter.targets.cuda.layer_compile import LayerForwards
from redrafter.targets.cuda.tree_attention import PassThroughCache, active, use_tree_attention
from redrafter.targets.target import Target

PIECE = 4096
"""Prompt tokens per pass, over all rows."""


class TreeTarget:
    """A `FlatPass`. With `compiles`, every layer is fused or compiled."""

    def __init__(
        self, target: Target, compiles: bool = False, same_bits: bool | None = None, verdict: Path | None = None
    ) -> None:
        """verdict: the file that keeps what a trial of `same_bits` finds."""
        if target.scales:
            raise UnsupportedTarget("the tree kernel does not scale queries by their positions")
        self.target = target
        self.same_bits = same_bits
        self.verdict = verdict
        self.heads: int = target.config.num_attention_heads
        self.replacements = stack_linears(target.model)
        for stack in {id(r.slice.stack): r.slice.stack for r in self.replacements}.values():
            if stack.moved:
                target.on_release(stack.separate)
        if compiles:  # transformers adds its hooks when hidden states are first asked for: before they are compiled
            target.states(torch.zeros(1, 1, dtype=torch.long, device=target.device), (-1,))
        self.forwards = LayerForwards(target, self.replacements, compiles)

    @property
    def flat(self) -> "TreeTarget":
        return self

    @property
    def fused(self) -> bool:
        return self.forwards.fused

    @property
    def longest(self) -> int:
        return self.target.max_positions - 1

    @contextlib.contextmanager
    def using(self, cache: KVCache) -> Iterator[None]:
        """Run the model on this KV cache, with all of the faster parts in place."""
        with use_tree_attention(self.target, cache), replaced(self.replacements), self.forwards.installed():
            yield

    @torch.compiler.disable  # a compiled step calls this method and does not trace it
    def run(
        self, flat: Flat, cache: KVCache, layers: tuple[int, ...], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FlatPass.run`; other passes of the model before and after it are its own."""
        with self.using(cache):
            active().begin(flat, self.heads)
            masks = self.target.attention.lines(flat.lines)
            positions = self.target.clamp_positions(flat.positions)[None]
            logits, hidden = self.target.run(flat.tokens[None], positions, masks, PassThroughCache(), layers, wanted)
        return logits[0], hidden[0]

    @torch.compiler.disable
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        flat, at = of_trees(tree, lengths, self.longest)
        logits, hidden = self.run(flat, cache, layers)
        return logits[at], hidden[at]

    def read(self, pieces: Sequence[Piece], cache: KVCache, layers: tuple[int, ...]) -> list[Tensor]:
        """Several pieces share a pass, and a long piece takes several."""
        left = [
            replace(p, begin=p.begin + i, tokens=p.tokens[i : i + PIECE])
            for p in pieces
            for i in range(0, len(p.tokens), PIECE)
        ]
        hidden: dict[int, list[Tensor]] = {piece.place: [] for piece in pieces}
        while left:
            room, some = PIECE, []
            while left and len(left[0].tokens) <= room:
                some.append(left.pop(0))
                room -= len(some[-1].tokens)
            one = torch.zeros(1, dtype=torch.long, device=self.target.device)  # nobody reads the logits
            _, states = self.run(self._lines(some), cache, layers, one)
            for piece, own in zip(some, states.split([len(piece.tokens) for piece in some]), strict=True):
                hidden[piece.place].append(own)
        return [torch.cat(hidden[piece.place]) for piece in pieces]

    def score(self, piece: Piece, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.run(self._lines([piece]), cache, layers)
        return found

    def _lines(self, pieces: Sequence[Piece]) -> Flat:
        flat = of_pieces(pieces, self.longest)
        return Flat(put(flat.lines, self.target.device), put(flat.runs, self.target.device))
