"""A target that verifies with the tree attention kernel: every key is read once, and no mask is as long as the cache.

Inside `TreeTarget.using` the model runs with the kernel as its attention, stacked linear layers, and fused or compiled
layers. Afterwards the model has its own modules again; its parameters stay stacked until `Target.release`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree
from redrafter.targets.cuda.fused_qkv import replaced, stack_linears
from redrafter.targets.cuda.layer_compile import LayerForwards
from redrafter.targets.cuda.tree_attention import PassThroughCache, use_tree_attention
from redrafter.targets.target import Target

PIECE = 4096
"""Prompt tokens per pass, over all rows: bounds the logits of a pass in which every prompt ends at another column."""


class TreeTarget:
    """`core.step`'s target inside `using`. With `compiles`, every layer is fused or compiled."""

    def __init__(self, target: Target, compiles: bool = False) -> None:
        self.target = target
        self.compiles = compiles
        self.replacements = stack_linears(target.model)
        for stack in {id(r.slice.stack): r.slice.stack for r in self.replacements}.values():
            if stack.moved:
                target.on_release(stack.separate)
        if compiles:  # transformers adds its hooks when hidden states are first asked for: before they are compiled
            target.states(torch.zeros(1, 1, dtype=torch.long, device=target.device), (-1,))
        self.forwards = LayerForwards(target, self.replacements, compiles)
        self.same_bits: bool | None = None  # the verdict of `same_bits.same_bits`, None until it was tried
        self.verdict: Path | None = None  # the file that keeps this verdict

    @contextlib.contextmanager
    def using(self, cache: KVCache) -> Iterator[None]:
        """Run the model on this KV cache, with all of the faster parts in place."""
        with use_tree_attention(self.target, cache), replaced(self.replacements), self.forwards.installed():
            yield

    @torch.compiler.disable  # a compiled step calls this method and does not trace it
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As Target.verify; `cache` is the one given to `using`."""
        return self.forward(tree.tokens, tree.depths, tree.mask, lengths, layers, deepest=tree.length)

    def prefill(
        self,
        tokens: Tensor,
        lengths: list[int],
        cache: KVCache,
        layers: tuple[int, ...],
        begin: int = 0,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As Target.prefill, for rows at `places` (B,) of the cache. A piece of a prompt is a tree without branches."""
        batch, total = tokens.shape
        piece = max(16, PIECE // batch)
        last: dict[int, Tensor] = {}
        hidden: list[Tensor] = []
        for start in range(begin, total, piece):
            stop = min(start + piece, total)
            depths = torch.arange(stop - start, device=tokens.device).expand(batch, -1)
            at = torch.full((batch,), start, device=tokens.device)
            ends = sorted({n - 1 - start for n in lengths if start < n <= stop}) or [0]  # columns that end a prompt
            keep = torch.tensor(ends, device=tokens.device)
            logits, states = self.forward(tokens[:, start:stop], depths, None, at, layers, places, keep)
            hidden.append(states)
            for row, n in enumerate(lengths):
                if start < n <= stop:
                    last[row] = logits[row, ends.index(n - 1 - start)]
        return torch.stack([last[row] for row in range(batch)]), torch.cat(hidden, dim=1)

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor | None,
        lengths: Tensor,
        layers: tuple[int, ...],
        places: Tensor | None = None,
        keep: Tensor | None = None,
        deepest: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One pass over nodes (B, n); without `ancestors` the nodes are a chain.

        `places` (B,) are the rows of the KV cache, by default 0, 1, …. `keep` lists the columns whose logits are
        wanted, by default all. No node of a tree is deeper than `deepest`.
        """
        masks = self.target.attention.packed(lengths, depths, ancestors, places, deepest)
        positions = self.target.clamp_positions(lengths[:, None] + depths)
        return self.target.run(tokens, positions, masks, PassThroughCache(), layers, keep)
