"""A target that verifies through the tree kernel: keys are read once, no mask as long as the cache is made.

The kernel stands in for the model's own attention, joint products for layers that read the same, and fused or compiled
passes for whole layers, while a step is compiled or recorded; the model is as before afterwards.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree
from redrafter.targets.cuda.fused_qkv import standing, stands
from redrafter.targets.cuda.layer_compile import TOGETHER, Regions
from redrafter.targets.cuda.tree_attention import PassingCache, served
from redrafter.targets.target import Target

PIECE = 512
"""Prompt tokens per pass, of all rows together."""


class TreeTarget:
    """`core.step`'s target while `serving` is in force. With `compiles`, all of its layers are compiled or fused."""

    def __init__(self, target: Target, compiles: bool = False) -> None:
        self.target = target
        self.compiles = compiles
        self.stands = stands(target.model)
        if compiles:  # the first call that asks for hidden states hangs transformers' hooks: before regions hide them
            target.states(torch.zeros(1, 1, dtype=torch.long, device=target.device), (-1,))
        self.prepare = self._prepare
        if compiles:
            self.prepare = torch.compile(self._prepare, dynamic=True, fullgraph=True, options=TOGETHER)
        self.regions = Regions(target, self.stands, compiles)

    @contextlib.contextmanager
    def serving(self, cache: KVCache) -> Iterator[None]:
        """The kernel serves the model from this cache for a while."""
        with served(self.target, cache), standing(self.stands), self.regions.standing():
            yield

    @torch.compiler.disable  # a compiled step calls it and does not look inside
    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As Target.verify; `cache` is the one that is served."""
        return self.forward(tree.tokens, tree.depths, tree.mask, lengths, layers)

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
            first = max(min(start, stop - 2), 0)  # a piece of one would be compiled for itself: read one again
            depths = torch.arange(stop - first, device=tokens.device).expand(batch, -1)
            chain = depths[:, :, None] >= depths[:, None, :]
            at = torch.full((batch,), first, device=tokens.device)
            logits, states = self.forward(tokens[:, first:stop], depths, chain, at, layers, places)
            hidden.append(states[:, start - first :])
            for row, n in enumerate(lengths):
                if start < n <= stop:
                    last[row] = logits[row, n - 1 - first]
        return torch.stack([last[row] for row in range(batch)]), torch.cat(hidden, dim=1)

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        lengths: Tensor,
        layers: tuple[int, ...],
        places: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows (B, n) stand at these places (B,) of the served cache, by default each at its own number.

        `keep` lists the columns whose logits are wanted, by default all.
        """
        positions, masks = self.prepare(lengths, depths, ancestors, places)
        return self.target.run(tokens, positions, masks, PassingCache(), layers, keep)

    def _prepare(
        self, lengths: Tensor, depths: Tensor, ancestors: Tensor, places: Tensor | None
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Where the nodes stand and what they see."""
        seen = self.target.attention.packed(lengths, depths, ancestors, places)
        return self.target.existing(lengths[:, None] + depths), seen
