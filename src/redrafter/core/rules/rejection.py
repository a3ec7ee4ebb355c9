"""The rule `rejection`: p/q tests on tokens sampled from q. Lossless in distribution, not token for token.

The target's distribution is p, the drafter's is q. The tests are sound only for tokens that were truly sampled from q:
see sampled_tree.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.config import RuleConfig, Shape
from redrafter.core.accept import Accepted, path_to
from redrafter.core.noise import ACCEPT, RESIDUAL, gumbel, uniform
from redrafter.core.rules.protocols import Search
from redrafter.core.rules.sampled_tree import SampledSearch, branching_nodes, layout_of
from redrafter.core.sampling import Sampling, floor, node_logits, restrict
from redrafter.core.tree import Tree
from redrafter.kernels import verify
from redrafter.kernels.verify.naive import drawn, numbers


@dataclass(frozen=True)
class RejectionRule:
    """Samples the tree from q and accepts by p/q."""

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
        branching = self.branching[: tree.length]  # shorter where the drafter stopped, empty after the prompt
        logits = node_logits(logits, sampling, counts, tree)
        if all(factor == 1 for factor in branching):
            return accept_chain(logits, tree, floor=floor(logits, sampling), **rows)
        assert tree.draft_logits is not None, "a tree for rejection keeps the logits its children were drawn from"
        draft_logp = restrict(tree.draft_logits, sampling).log_softmax(-1)
        return accept_rejection(restrict(logits, sampling), draft_logp, tree, branching=branching, **rows)


def rejection_from_logits(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    *,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floors: tuple[Tensor, Tensor] | None = None,
    streams: tuple[int, int] = (ACCEPT, RESIDUAL),
) -> tuple[Tensor, Tensor]:
    """The p/q test of a chain of drafted tokens (B, G) -> new tokens (B, G+1), and how many are accepted (B,).

    Raw logits (B, G+1, V) and (B, G, V). The first `counts` (B,) tokens of a row are real; they were sampled from the
    draft's logits under the same temperature and floors (B, G+1), (B, G). Entry `accepted` of the new tokens is the
    target's own; later entries are meaningless. The last token is at `positions` (B,).
    """
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32

    def coins() -> Tensor:
        ahead = positions[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)
        return uniform(seeds, ahead, 1, stream=streams[0], dtype=dtype)[..., 0]

    def noise(accepted: Tensor) -> Tensor:
        where = (positions + 1 + accepted)[:, None]
        return gumbel(seeds, where, numbers(target.shape[-1]), stream=streams[1], dtype=dtype)[:, 0]

    return verify.fused(target, draft, tokens, counts, temperature, seeds, positions, floors, streams, coins, noise)


def accept_chain(
    logits: Tensor,
    tree: Tree,
    *,
    floor: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    streams: tuple[int, int] = (ACCEPT, RESIDUAL),
) -> Accepted:
    """The p/q test where every node has one child, from raw logits (B, L+1, V)."""
    gamma = tree.tokens.shape[1] - 1
    draft = logits[:, :0] if tree.draft_logits is None else tree.draft_logits[:, :gamma]  # none after the prompt
    floors = None
    if floor is not None:
        floors = floor, floor[:, :0] if tree.draft_floor is None else tree.draft_floor[:, :gamma]
    tokens, accepted = rejection_from_logits(
        logits,
        draft,
        tree.tokens[:, 1:],
        counts=tree.valid.sum(1) - 1,
        temperature=temperature,
        seeds=seeds,
        positions=positions,
        floors=floors,
        streams=streams,
    )
    path = torch.arange(gamma + 1, device=tokens.device).expand_as(tokens)
    return Accepted(path, tokens, count=accepted + 1, drafted=accepted, nodes=tree.valid.sum(1) - 1)


def accept_rejection(
    scores: Tensor,
    draft_logp: Tensor,
    tree: Tree,
    *,
    branching: tuple[int, ...],
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    streams: tuple[int, int] = (ACCEPT, RESIDUAL),
) -> Accepted:
    """Recursive rejection: test a node's children in order, subtracting q from p after each refusal.

    `scores` (B, N+1, V) are the target's; the children of node i < I were drawn from `draft_logp` (B, I, V).
    Child x is accepted with probability min(1, p(x)/q(x)). After a refusal p becomes (p − q)+ and q loses x, both
    renormalised. When no child is left, the token is drawn from the remaining p.
    """
    batch, _, vocab = scores.shape
    device, dtype = scores.device, scores.dtype
    row = torch.arange(batch, device=device)
    greedy = temperature[:, None] <= 0
    children = layout_of(branching, device).children
    where = positions[:, None] + 1 + torch.arange(tree.length + 1, device=device)  # (B, L+1) predicted positions
    coins = uniform(seeds, where, children.shape[1], stream=streams[0], dtype=dtype)
    residual_noise = gumbel(seeds, where, numbers(vocab), stream=streams[1], dtype=dtype)

    def target_p(node: Tensor) -> Tensor:
        there = scores[row, node]  # (B, V)
        best = torch.nn.functional.one_hot(there.argmax(-1), vocab).to(dtype)
        return torch.where(greedy, best, there.softmax(-1))

    node = torch.zeros(batch, dtype=torch.long, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)  # still walking down
    p = target_p(node)
    for depth, factor in enumerate(branching):
        logq = draft_logp[row, node.clamp(max=draft_logp.shape[1] - 1)].to(dtype)
        moved = torch.zeros_like(alive)
        for i in range(factor):
            child = children[node, i]
            token = tree.tokens[row, child]
            q = logq.exp()
            p_x, q_x = p[row, token], q[row, token]
            tested = alive & ~moved & tree.valid[row, child]  # an empty node refuses nothing
            take = tested & (q_x > 0) & (coins[:, depth, i] * q_x < p_x)
            refuse = tested & ~take
            rest = (p - q).clamp(min=0)
            mass = rest.sum(-1, keepdim=True)
            p = torch.where(refuse[:, None] & (mass > 0), rest / mass, p)
            # Renormalised as logarithms: the rest of a sharp q may be smaller than any float. Nothing left: q = 0.
            logq = logq.scatter(1, token[:, None], -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf)
            moved = moved | take  # the remaining children are not tested
            node = torch.where(take, child, node)
        p = torch.where(moved[:, None], target_p(node), p)
        alive = moved
    depth_of = tree.depths[row, node]
    own = torch.where(greedy[:, 0], p.argmax(-1), drawn(p.log(), residual_noise[row, depth_of]))
    path = path_to(tree, node)
    drafted = torch.cat([tree.tokens.gather(1, path)[:, 1:], own[:, None]], 1)
    place = torch.arange(tree.length + 1, device=device)
    tokens = torch.where(place == depth_of[:, None], own[:, None], drafted)
    return Accepted(path, tokens, count=depth_of + 1, drafted=depth_of, nodes=tree.valid.sum(1) - 1)


def make(config: RuleConfig, shape: Shape, vocab_size: int, dtype: torch.dtype) -> RejectionRule:  # noqa: ARG001
    """As the other rules are made; its noise has one dtype."""
    return RejectionRule(config, shape, vocab_size)
