"""The `rejection` rule: p/q tests on guesses that were truly sampled from q.

Lossless in distribution (not token for token). Children of a node are drawn in order without
replacement from the drafter's distribution there, so a child's survival never depends on which
token it is: no beam search, no node budget, a fixed branching instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.accept import Accepted, path_to
from redrafter.core.beam import Advance, State
from redrafter.core.noise import ACCEPT, DRAFT, RESIDUAL, gumbel, uniform
from redrafter.core.sampling import Sampling, restrict, smallest_kept
from redrafter.core.tree import Tree, ancestors
from redrafter.core.verify import rejection_from_logits
from redrafter.errors import ConfigError
from redrafter.kernels.verify import naive


def branching_layout(branching: Sequence[int]) -> tuple[list[int], list[int], list[list[int]]]:
    """Parents, depths and children of the fixed tree, root at 0, depth by depth.

    >>> branching_layout((2, 1))
    ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2], [[1, 2], [3], [4], [], []])
    """
    parents, depths, level = [0], [0], [0]
    children: list[list[int]] = [[]]
    for depth, factor in enumerate(branching, start=1):
        below = []
        for node in level:
            for _ in range(factor):
                children[node].append(len(parents))
                below.append(len(parents))
                parents.append(node)
                depths.append(depth)
                children.append([])
        level = below
    return parents, depths, children


@dataclass(frozen=True)
class Layout:
    """The fixed tree as tensors."""

    parents: Tensor  # (N+1,)
    depths: Tensor  # (N+1,)
    children: Tensor  # (N+1, most) padded with 0


_LAYOUTS: dict[tuple[tuple[int, ...], torch.device], Layout] = {}


def _layout(branching: tuple[int, ...], device: torch.device) -> Layout:
    """Made once: moving it to a device waits for the host, which a step must not."""
    if (branching, device) not in _LAYOUTS:
        parents, depths, children = branching_layout(branching)
        most = max(branching, default=1)
        padded = [c + [0] * (most - len(c)) for c in children]
        _LAYOUTS[branching, device] = Layout(*(torch.tensor(x, device=device) for x in (parents, depths, padded)))
    return _LAYOUTS[branching, device]


def branching_nodes(branching: Sequence[int]) -> int:
    """Nodes of the fixed tree, the root left out."""
    return len(branching_layout(branching)[0]) - 1


def sample_tree(
    advance: Advance[State],
    state: State,
    last: Tensor,
    *,
    branching: tuple[int, ...],
    sampling: Sampling,
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    token_ids: Tensor | None = None,
    stream: int = DRAFT,
) -> Tree:
    """Draw the fixed tree under `last` (B,), which stands at `positions` (B,).

    The k largest of log q + Gumbel noise, in order, are k draws without replacement. One noise
    per depth serves all nodes of it, since only one of them is ever walked through.
    """
    batch, device = last.shape[0], last.device
    tokens = [last[:, None]]
    drawn_from: list[Tensor] = []
    floors: list[Tensor] = []
    parent_beam = torch.zeros_like(last)[:, None]
    for depth, factor in enumerate(branching):
        logits, state = advance(state, tokens[-1], parent_beam)  # (B, w, V')
        if logits is None:  # decided before anything is drawn here, so no token's survival depends on which it is
            branching = branching[:depth]
            break
        if factor > logits.shape[-1]:
            raise ConfigError(f"branching {factor} is larger than the {logits.shape[-1]} tokens to guess among")
        if token_ids is not None:
            full = logits.new_full((*logits.shape[:2], vocab_size), -torch.inf)
            logits = full.index_copy_(2, token_ids, logits)
        scores = restrict(logits, sampling)  # (B, w, V)
        noise = gumbel(seeds, positions[:, None] + depth + 1, vocab_size, stream=stream, dtype=scores.dtype)
        noise = torch.where(sampling.temperature[:, None, None] > 0, noise, 0.0)  # at T = 0 the best k
        tokens.append((scores + noise).topk(factor, dim=-1).indices.flatten(1))
        drawn_from.append(logits)
        if sampling.filters:
            floors.append(smallest_kept(logits, scores))
        width = logits.shape[1]
        parent_beam = torch.arange(width, device=device).repeat_interleave(factor).expand(batch, -1)
    layout = _layout(branching, device)
    parents = layout.parents.expand(batch, -1)
    every = torch.cat(tokens, 1)
    return Tree(
        tokens=every,
        parents=parents,
        depths=layout.depths.expand(batch, -1),
        valid=torch.ones_like(every, dtype=torch.bool),
        mask=ancestors(parents, len(branching)),
        length=len(branching),
        draft_logits=torch.cat(drawn_from, 1),
        draft_floor=torch.cat(floors, 1) if floors else None,
    )


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
    """The p/q test where every node has one child, from raw logits (B, L+1, V): see core/verify.py."""
    gamma = tree.tokens.shape[1] - 1
    draft = logits[:, :0] if tree.draft_logits is None else tree.draft_logits[:, :gamma]  # none with the prompt
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

    `scores` (B, N+1, V) are the target's, `draft_logp` (B, I, V) what the children of node i < I were drawn from.
    Child x is taken with probability min(1, p(x)/q(x)). Refused, p becomes (p − q)+ and q loses x,
    both renormalised. When no child is left, the token is drawn from what remains of p.
    """
    batch, _, vocab = scores.shape
    device, dtype = scores.device, scores.dtype
    row = torch.arange(batch, device=device)
    greedy = temperature[:, None] <= 0
    children = _layout(branching, device).children
    where = positions[:, None] + 1 + torch.arange(tree.length + 1, device=device)  # (B, L+1) predicted here
    coins = uniform(seeds, where, children.shape[1], stream=streams[0], dtype=dtype)
    residual_noise = gumbel(seeds, where, naive.numbers(vocab), stream=streams[1], dtype=dtype)

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
            tested = alive & ~moved & tree.valid[row, child]  # a guess that is not there refuses nothing
            take = tested & (q_x > 0) & (coins[:, depth, i] * q_x < p_x)
            refuse = tested & ~take
            rest = (p - q).clamp(min=0)
            mass = rest.sum(-1, keepdim=True)
            p = torch.where(refuse[:, None] & (mass > 0), rest / mass, p)
            # Renormalised as logarithms: what is left of a sharp q may be smaller than any float. Nothing left: q = 0.
            logq = logq.scatter(1, token[:, None], -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf)
            moved = moved | take  # the children left over are then tested no more
            node = torch.where(take, child, node)
        p = torch.where(moved[:, None], target_p(node), p)
        alive = moved
    depth_of = tree.depths[row, node]
    own = torch.where(greedy[:, 0], p.argmax(-1), naive.drawn(p.log(), residual_noise[row, depth_of]))
    path = path_to(tree, node)
    drafted = torch.cat([tree.tokens.gather(1, path)[:, 1:], own[:, None]], 1)
    place = torch.arange(tree.length + 1, device=device)
    tokens = torch.where(place == depth_of[:, None], own[:, None], drafted)
    return Accepted(path, tokens, count=depth_of + 1, drafted=depth_of, nodes=tree.valid.sum(1) - 1)
