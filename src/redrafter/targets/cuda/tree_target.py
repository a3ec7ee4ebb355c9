"""A target that runs flat passes with the tree attention kernel: every key is read once, and no mask is long.

Inside `TreeTarget.using` the model runs with the kernel as its attention, stacked linear layers, and fused or compiled
layers. Afterwards the model has its own modules again; its parameters stay stacked until `Target.release`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, of_pieces, of_trees
from redrafter.core.transfer import put
from redrafter.core.tree import Tree
from redrafter.targets.cuda.fused_qkv import replaced, stack_linears
from redrafter.targets.cuda.layer_compile import LayerForwards
from redrafter.targets.cuda.tree_attention import PassThroughCache, active, use_tree_attention
from redrafter.targets.target import Target

PIECE = 4096
"""Prompt tokens per pass, over all rows."""


class TreeTarget:
    """`core.step`'s target inside `using`. With `compiles`, every layer is fused or compiled."""

    def __init__(self, target: Target, compiles: bool = False) -> None:
        self.target = target
        self.compiles = compiles
        self.heads: int = target.config.num_attention_heads
        self.replacements = stack_linears(target.model)
        for stack in {id(r.slice.stack): r.slice.stack for r in self.replacements}.values():
            if stack.moved:
                target.on_release(stack.separate)
        if compiles:  # transformers adds its hooks when hidden states are first asked for: before they are compiled
            target.states(torch.zeros(1, 1, dtype=torch.long, device=target.device), (-1,))
        self.forwards = LayerForwards(target, self.replacements, compiles)
        self.same_bits: bool | None = None  # the verdict of `same_bits.same_bits`, None until it was tried
        self.verdict: Path | None = None  # the file that keeps this verdict

    @property
    def longest(self) -> int:
        """The last position that exists."""
        return self.target.max_positions - 1

    @contextlib.contextmanager
    def using(self, cache: KVCache) -> Iterator[None]:
        """Run the model on this KV cache, with all of the faster parts in place."""
        with use_tree_attention(self.target, cache), replaced(self.replacements), self.forwards.installed():
            yield

    @torch.compiler.disable  # a compiled step calls this method and does not trace it
    def read(self, flat: Flat, layers: tuple[int, ...], wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One pass over T tokens -> logits (T or len(wanted), V), hidden states (T, C).

        `wanted` are the lines whose logits are wanted, by default all.
        """
        active().begin(flat, self.heads)
        masks = self.target.attention.lines(flat.lines)
        positions = self.target.clamp_positions(flat.positions)[None]
        logits, hidden = self.target.run(flat.tokens[None], positions, masks, PassThroughCache(), layers, wanted)
        return logits[0], hidden[0]

    @torch.compiler.disable
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As Target.verify; `cache` is the one given to `using`."""
        flat, at = of_trees(tree, lengths, self.longest)
        logits, hidden = self.read(flat, layers)
        return logits[at], hidden[at]

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        layers: tuple[int, ...],
        begin: int = 0,
        places: Sequence[int] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Prompts of rows at `places` of the KV cache, which holds the first `begin` tokens of each.

        Returns the logits (B, V) after each prompt and the hidden states (P - begin, C) of each. Several prompts share
        a pass.
        """
        places = range(len(prompts)) if places is None else places
        left = [(row, start) for row, prompt in enumerate(prompts) for start in range(begin, len(prompt), PIECE)]
        last: dict[int, Tensor] = {}
        hidden: list[list[Tensor]] = [[] for _ in prompts]
        while left:
            room, some = PIECE, []
            while left and (size := min(PIECE, len(prompts[left[0][0]]) - left[0][1])) <= room:
                some.append((*left.pop(0), size))
                room -= size
            pieces = [Piece(places[row], start, prompts[row][start : start + size]) for row, start, size in some]
            flat = of_pieces(pieces, self.longest)
            ends = flat.runs.sum(1) - 1
            lines, runs = (put(x, self.target.device) for x in (flat.lines, flat.runs))
            logits, states = self.read(Flat(lines, runs), layers, put(ends, self.target.device))
            for (row, start, size), own, state in zip(some, logits, states.split([s for *_, s in some]), strict=True):
                hidden[row].append(state)
                if start + size == len(prompts[row]):
                    last[row] = own
        return torch.stack([last[row] for row in range(len(prompts))]), [torch.cat(parts) for parts in hidden]
