"""Beam search under the target's own noise: the search that the rules `seeded` and `typical` share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from redrafter.config import RuleConfig, Shape
from redrafter.core.accept import Accepted
from redrafter.core.beam import Advance, Beam, Grow, State, beam_search, visited_nodes
from redrafter.core.chain import Chain
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.noise import SEEDED, gumbel
from redrafter.core.rules.protocols import Search
from redrafter.core.sampling import Sampling, floor
from redrafter.core.tree import Nodes, Tree, candidate_nodes, pack, path_tree, select_rows
from redrafter.errors import ConfigError
from redrafter.kernels import verify
from redrafter.kernels.argmax import argmax


class NoiseAhead:
    """Noise that is made when first needed. A plain step on a GPU needs none here: its kernel makes its own."""

    def __init__(self, make: Callable[[int, int], Tensor]) -> None:
        self.make = make  # (first, end) -> noise of these depths
        self.made: Tensor | None = None

    def __call__(self, count: int) -> Tensor:
        """(B, n, V) for the first n >= `count` positions after the last token."""
        if self.made is None:
            self.made = self.make(0, count)
        elif self.made.shape[1] < count:
            self.made = torch.cat([self.made, self.make(self.made.shape[1], count)], 1)
        return self.made


class HostChoice(Protocol):
    """Chooses on the host what a draft is: how far it goes, and which of its nodes are verified."""

    def ends(self, scores: Tensor) -> bool:
        """Whether the search ends at the depth whose paths have these scores (B, W)."""

    def pack(self, drafted: Beam | Nodes, chain: Chain | None, last: Tensor) -> Tree:
        """The tree of chosen nodes, in place of the node budget."""


@dataclass(frozen=True)
class BeamSearch:
    """Beam search under the target's noise, then the node budget, or what the host chooses."""

    shape: Shape
    sampling: Sampling
    noise: Callable[[int], Tensor]  # n -> (B, n or more, V) for the positions after the last token
    seeds: Tensor  # (B,) the noise is made from these
    positions: Tensor  # (B,) of the last tokens
    chain: Chain | None = None  # mixed into what `tree` and `fixed` search
    choice: HostChoice | None = None

    @property
    def visited(self) -> int:
        return self.shape.width * self.shape.length

    def beam(self, advance: Advance[State], state: State, last: Tensor, token_ids: Tensor | None = None) -> Beam:
        return beam_search(
            advance,
            state,
            last,
            width=self.shape.width,
            length=self.shape.length,
            temperature=self.sampling.temperature,
            noise=self.noise(self.shape.length + 1),
            token_ids=token_ids,
            chain=self.chain,
            ends=None if self.choice is None else self.choice.ends,
        )

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Grow | None = None,
    ) -> Tree:
        if grow is None:
            beam = self.beam(advance, state, last, token_ids)
        else:
            noise = self.noise(self.shape.length) if self.sampling.samples else None
            beam = grow(self.shape, self.sampling.temperature, noise, self.chain)
            if self.shape.width == 1 and self.choice is None:  # nothing to choose among, and the budget is the length
                return path_tree(last, beam.tokens[:, : self.shape.budget, 0])
        if self.choice is not None:
            return self.choice.pack(beam, self.chain, last)
        chain = None if self.chain is None else self.chain.upto(self.shape.budget)
        return self._pack(visited_nodes(beam, chain), last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        if self.chain is not None:
            raise ConfigError("n-grams mix into a drafter that gives probabilities: leave out +ngram for this drafter")
        if beam.ndim != 3 or beam.shape != scores.shape or len(beam) != len(last):
            raise ConfigError(
                f"candidates and their scores must be (B, W, L) with B = {len(last)}, got {tuple(beam.shape)} and "
                f"{tuple(scores.shape)}"
            )
        nodes, _ = candidate_nodes(beam, scores)
        return self._pack(nodes, last) if self.choice is None else self.choice.pack(nodes, None, last)

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        noise = self.noise(tree.length + 1)[:, : tree.length]
        noise = noise if token_ids is None else noise[..., token_ids]
        temperature = self.sampling.temperature[:, None, None]
        scale = torch.where(temperature > 0, temperature, 1.0).to(noise.dtype)
        best = (logits[:, : tree.length].to(noise.dtype) / scale + noise).topk(tree.width, dim=-1).indices
        filled = tree.fill(best if token_ids is None else token_ids[best], last)
        if self.chain is None and self.choice is None:
            return filled

        def advance(depth: int, tokens: Tensor, _: Tensor) -> tuple[Tensor | None, int]:
            here = logits[:, depth, None].expand(-1, tokens.shape[1], -1) if depth < logits.shape[1] else None
            return here, depth + 1

        # A fixed tree has no place for a chain: a row that has one gets the tree of a beam search instead.
        searched = self.tree(advance, 0, last, token_ids)
        if self.chain is None or self.choice is not None:
            return searched
        return select_rows(self.chain.odds[:, 0] > 0, searched, filled)

    def _pack(self, nodes: Nodes, last: Tensor) -> Tree:
        tree, _ = pack(nodes, last, self.shape.budget)
        return tree


@dataclass(frozen=True)
class BeamRule(ABC):
    """A rule that drafts by `BeamSearch`. A subclass says which nodes to accept."""

    config: RuleConfig
    shape: Shape
    vocab_size: int
    dtype: torch.dtype  # of the noise

    @property
    def nodes(self) -> int:
        return self.shape.budget

    def search(self, sampling: Sampling, seeds: Tensor, lengths: Tensor) -> BeamSearch:
        def noise(first: int, end: int) -> Tensor:
            ahead = lengths[:, None] + 1 + torch.arange(first, end, device=lengths.device)
            if not sampling.samples:
                return torch.zeros(1, dtype=self.dtype, device=lengths.device).expand(*ahead.shape, self.vocab_size)
            drawn = gumbel(seeds, ahead, self.vocab_size, stream=SEEDED, dtype=self.dtype)
            return verify.where_sampled(drawn, sampling.temperature)

        return BeamSearch(self.shape, sampling, NoiseAhead(noise), seeds, lengths)

    @abstractmethod
    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        """See `Rule.accept`."""


def target_choices(search: BeamSearch, tree: Tree, logits: Tensor) -> Tensor:
    """(B, N+1) the token that plain decoding would choose at each node, from its `node_logits` (B, N+1, V)."""
    sampling = search.sampling
    if not sampling.samples:  # no filter removes the best token
        return argmax(logits)
    return verify.seeded(
        logits,
        tree.depths,
        sampling.temperature,
        search.seeds,
        search.positions,
        floor(logits, sampling),
        SEEDED,
        lambda: search.noise(tree.length + 1),
    )
