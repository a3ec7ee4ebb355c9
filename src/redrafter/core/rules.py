"""A rule is a way to search and the way to accept that is sound for it; this file pairs them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.config import RuleConfig, Shape
from redrafter.core import verify
from redrafter.core.accept import Accepted, accept_seeded, accept_typical
from redrafter.core.beam import Advance, Beam, State, beam_search, visited_nodes
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.noise import SEEDED, gumbel
from redrafter.core.rejection import accept_chain, accept_rejection, branching_nodes, sample_tree
from redrafter.core.sampling import Sampling, floor, node_logits, node_scores, restrict
from redrafter.core.tree import Nodes, Tree, candidate_nodes, pack
from redrafter.errors import ConfigError


class Search(Protocol):
    """Handed to the drafter for one step: how to turn its network or its candidates into a tree."""

    @property
    def shape(self) -> Shape:
        """How much to guess."""

    @property
    def visited(self) -> int:
        """How many nodes `tree` may visit."""

    def tree(self, advance: Advance[State], state: State, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        """Search a network that can be advanced token by token."""

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        """Pack plain candidates (B, W, L) with node scores (B, W, L), -inf where there is none."""

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        """Guesses of all depths at once, logits (B, L, V'): the best tokens of each depth in a fixed tree's places."""


class Rule(Protocol):
    """Makes a search for a step and judges the tree that came of it."""

    @property
    def config(self) -> RuleConfig:
        """What it was made from."""

    @property
    def nodes(self) -> int:
        """N: drafted nodes verified per step."""

    def search(self, sampling: Sampling, seeds: Tensor, lengths: Tensor) -> Search:
        """For rows whose last tokens stand at positions `lengths` (B,)."""

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        """Judge a verified tree."""


@dataclass(frozen=True)
class BeamSearch:
    """Beam search under the target's own noise, then the node budget."""

    shape: Shape
    sampling: Sampling
    noise: Tensor  # (B, L+1, V) of the positions after the last token
    seeds: Tensor  # (B,) that the noise is made from
    positions: Tensor  # (B,) of the last tokens

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
            noise=self.noise,
            token_ids=token_ids,
        )

    def tree(self, advance: Advance[State], state: State, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        return self._pack(visited_nodes(self.beam(advance, state, last, token_ids)), last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        nodes, _ = candidate_nodes(beam, scores)
        return self._pack(nodes, last)

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        noise = self.noise[:, : tree.length]
        noise = noise if token_ids is None else noise[..., token_ids]
        temperature = self.sampling.temperature[:, None, None]
        scale = torch.where(temperature > 0, temperature, 1.0).to(noise.dtype)
        best = (logits[:, : tree.length].to(noise.dtype) / scale + noise).topk(tree.width, dim=-1).indices
        return tree.fill(best if token_ids is None else token_ids[best], last)

    def _pack(self, nodes: Nodes, last: Tensor) -> Tree:
        tree, _ = pack(nodes, last, self.shape.budget)
        return tree


@dataclass(frozen=True)
class SampledSearch:
    """Draws a fixed branching from the drafter's own distribution, under noise of its own."""

    shape: Shape
    sampling: Sampling
    branching: tuple[int, ...]
    seeds: Tensor  # (B,)
    positions: Tensor  # (B,) of the last tokens
    vocab_size: int

    @property
    def visited(self) -> int:
        return branching_nodes(self.branching)

    def tree(self, advance: Advance[State], state: State, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        return sample_tree(
            advance,
            state,
            last,
            branching=self.branching,
            sampling=self.sampling,
            seeds=self.seeds,
            positions=self.positions,
            vocab_size=self.vocab_size,
            token_ids=token_ids,
        )

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        raise ConfigError("the rejection rule needs a drafter with probabilities; use the rule 'seeded' here")

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        if len(self.branching) > logits.shape[1]:
            raise ConfigError(
                f"this drafter guesses {logits.shape[1]} tokens ahead, the rule asks for {len(self.branching)}"
            )

        def advance(depth: int, tokens: Tensor, _: Tensor) -> tuple[Tensor, int]:
            return logits[:, depth, None].expand(-1, tokens.shape[1], -1), depth + 1

        return self.tree(advance, 0, last, token_ids)


@dataclass(frozen=True)
class BeamRule:
    """`seeded` and `typical`: search under the target's noise, accept by its scores."""

    config: RuleConfig
    shape: Shape
    vocab_size: int
    dtype: torch.dtype
    judge: Callable[[Tensor, Tree, Tensor | None], Accepted]

    @property
    def nodes(self) -> int:
        return self.shape.budget

    def search(self, sampling: Sampling, seeds: Tensor, lengths: Tensor) -> BeamSearch:
        ahead = lengths[:, None] + 1 + torch.arange(self.shape.length + 1, device=lengths.device)
        if sampling.hot:
            noise = gumbel(seeds, ahead, self.vocab_size, stream=SEEDED, dtype=self.dtype)
            noise = torch.where(sampling.temperature[:, None, None] > 0, noise, 0.0)
        else:
            noise = torch.zeros(1, dtype=self.dtype, device=lengths.device).expand(*ahead.shape, self.vocab_size)
        return BeamSearch(self.shape, sampling, noise, seeds, lengths)

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, BeamSearch)
        if self.config.name == "seeded" and search.sampling.hot and verify.on_kernel(logits):
            logits = node_logits(logits, search.sampling, counts, tree)
            return verify.seeded_from_logits(
                logits,
                tree,
                temperature=search.sampling.temperature,
                seeds=search.seeds,
                positions=search.positions,
                floor=floor(logits, search.sampling),
            )
        scores = node_scores(logits, search.sampling, counts, tree)
        return self.judge(scores, tree, search.noise if search.sampling.hot else None)


@dataclass(frozen=True)
class RejectionRule:
    """`rejection`: sample the tree from q, accept by p/q."""

    config: RuleConfig
    shape: Shape
    vocab_size: int

    @property
    def branching(self) -> tuple[int, ...]:
        return self.config.branching or (1,) * self.shape.length

    @property
    def nodes(self) -> int:
        return branching_nodes(self.branching)

    def search(self, sampling: Sampling, seeds: Tensor, lengths: Tensor) -> SampledSearch:
        return SampledSearch(self.shape, sampling, self.branching, seeds, lengths, self.vocab_size)

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, SampledSearch)
        sampling = search.sampling
        rows: dict[str, Any] = {
            "temperature": sampling.temperature,
            "seeds": search.seeds,
            "positions": search.positions,
        }
        branching = self.branching[: tree.length]  # shorter where the drafter stopped; none after the prompt
        logits = node_logits(logits, sampling, counts, tree)
        if all(factor == 1 for factor in branching):
            return accept_chain(logits, tree, floor=floor(logits, sampling), **rows)
        assert tree.draft_logits is not None, "a tree for rejection keeps what its children were drawn from"
        draft_logp = restrict(tree.draft_logits, sampling).log_softmax(-1)
        return accept_rejection(restrict(logits, sampling), draft_logp, tree, branching=branching, **rows)


def make_rule(config: RuleConfig, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Rule:
    """`dtype` is the target's; noise and scores are fp32, or fp64 for a target in fp64."""
    noise_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if config.name == "rejection":
        return RejectionRule(config, shape, vocab_size)
    if config.name == "typical":

        def typical(scores: Tensor, tree: Tree, noise: Tensor | None) -> Accepted:
            return accept_typical(scores, tree, noise, epsilon=config.epsilon, delta=config.delta)

        return BeamRule(config, shape, vocab_size, noise_dtype, typical)
    return BeamRule(config, shape, vocab_size, noise_dtype, accept_seeded)
