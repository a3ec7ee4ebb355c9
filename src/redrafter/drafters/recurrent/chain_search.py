"""A beam search that returns one chain, for engines that verify chains."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.beam import Advance, Grow, State, beam_search
from redrafter.core.chain import Chain
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.tree import Tree
from redrafter.errors import ConfigError


@dataclass(frozen=True)
class ChainSearch:
    """A `Search` that returns one chain: the best path of the beam, while its probability is at least a minimum."""

    shape: Shape
    min_probability: float
    vocab_size: int
    dtype: torch.dtype  # of the scores
    chain: Chain | None = None  # of n-grams, mixed in

    @property
    def visited(self) -> int:
        return self.shape.width * self.shape.length

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Grow | None = None,
    ) -> Tree:
        rows, width, length = last.shape[0], self.shape.width, self.shape.length
        zero = torch.zeros(1, dtype=self.dtype, device=last.device)
        beam = beam_search(
            advance,
            state,
            last,
            width=width,
            length=length,
            temperature=zero.expand(rows),
            noise=zero.expand(rows, length + 1, self.vocab_size),
            token_ids=token_ids,
            chain=self.chain,
        )
        if width == 1:
            return self._tree(beam.tokens[:, :, 0], beam.scores[:, :, 0], last)
        at = torch.zeros_like(last)[:, None]
        path = []
        for depth in reversed(range(length)):
            path.append((beam.tokens[:, depth].gather(1, at), beam.scores[:, depth].gather(1, at)))
            at = beam.parents[:, depth].gather(1, at)
        tokens, scores = (torch.cat(x[::-1], dim=1) for x in zip(*path, strict=True))  # (B, L)
        return self._tree(tokens, scores, last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        return self._tree(beam[:, 0], scores[:, 0], last)

    def _tree(self, tokens: Tensor, scores: Tensor, last: Tensor) -> Tree:
        """One path (B, L) with the scores of its nodes. It needs no packing."""
        rows, length = tokens.shape
        place = torch.arange(length + 1, device=last.device)
        floor = math.log(self.min_probability) if self.min_probability > 0 else -math.inf
        real = (scores >= floor) & (scores > -math.inf)
        valid = torch.cat([torch.ones_like(real[:, :1]), real.long().cumprod(1).bool()], dim=1)
        return Tree(
            torch.cat([last[:, None], tokens], dim=1),
            (place - 1).clamp(min=0).expand(rows, -1),
            place.expand(rows, -1),
            valid,
            (place[:, None] >= place).expand(rows, -1, -1),
            length,
        )

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        raise ConfigError("only a recurrent drafter drafts chains for another engine")
