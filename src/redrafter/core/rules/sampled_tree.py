"""A tree of fixed branching, sampled from the drafter's own distribution: the search of the rule `rejection`.

The children of a node are drawn in order, without replacement. A child's survival must never depend on which token it
is, so there is no beam search and no node budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.beam import Advance, Grow, State
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.noise import DRAFT, gumbel
from redrafter.core.sampling import Sampling, floor
from redrafter.core.tree import Tree, ancestors
from redrafter.errors import ConfigError
from redrafter.kernels.verify.naive import tempered


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


def branching_nodes(branching: Sequence[int]) -> int:
    """Nodes of the fixed tree, without the root."""
    return len(branching_layout(branching)[0]) - 1


@dataclass(frozen=True)
class Layout:
    """The fixed tree as tensors."""

    parents: Tensor  # (N+1,)
    depths: Tensor  # (N+1,)
    children: Tensor  # (N+1, most) padded with 0


_LAYOUTS: dict[tuple[tuple[int, ...], torch.device], Layout] = {}


def layout_of(branching: tuple[int, ...], device: torch.device) -> Layout:
    """The layout, made once per device: a copy to a device would make a step wait for the host."""
    if (branching, device) not in _LAYOUTS:
        parents, depths, children = branching_layout(branching)
        most = max(branching, default=1)
        padded = [c + [0] * (most - len(c)) for c in children]
        _LAYOUTS[branching, device] = Layout(*(torch.tensor(x, device=device) for x in (parents, depths, padded)))
    return _LAYOUTS[branching, device]


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
    """Draw the fixed tree under `last` (B,), which is at `positions` (B,).

    The k largest of log q + Gumbel noise, in order, are k draws without replacement. All nodes of a depth share one
    noise, since a step walks through only one of them.
    """
    batch, device = last.shape[0], last.device
    tokens = [last[:, None]]
    drawn_from: list[Tensor] = []
    floors: list[Tensor] = []
    parent_beam = torch.zeros_like(last)[:, None]
    for depth, factor in enumerate(branching):
        logits, state = advance(state, tokens[-1], parent_beam)  # (B, w, V')
        if logits is None:  # decided before any draw at this depth, so no token's survival depends on which it is
            branching = branching[:depth]
            break
        if factor > logits.shape[-1]:
            raise ConfigError(f"branching {factor} is larger than the {logits.shape[-1]} tokens to guess among")
        if token_ids is not None:
            full = logits.new_full((*logits.shape[:2], vocab_size), -torch.inf)
            logits = full.index_copy_(2, token_ids, logits)
        smallest = floor(logits, sampling)
        scores = tempered(logits, sampling.temperature, smallest)  # (B, w, V)
        noise = gumbel(seeds, positions[:, None] + depth + 1, vocab_size, stream=stream, dtype=scores.dtype)
        noise = torch.where(sampling.temperature[:, None, None] > 0, noise, 0.0)  # at T = 0 the best k
        tokens.append((scores + noise).topk(factor, dim=-1).indices.flatten(1))
        drawn_from.append(logits)
        if smallest is not None:
            floors.append(smallest)
        width = logits.shape[1]
        parent_beam = torch.arange(width, device=device).repeat_interleave(factor).expand(batch, -1)
    layout = layout_of(branching, device)
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


@dataclass(frozen=True)
class SampledSearch:
    """Draws the tree from the drafter's distribution, under noise of its own."""

    shape: Shape
    sampling: Sampling
    branching: tuple[int, ...]
    seeds: Tensor  # (B,)
    positions: Tensor  # (B,) of the last tokens
    vocab_size: int

    @property
    def visited(self) -> int:
        return branching_nodes(self.branching)

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Grow | None = None,
    ) -> Tree:
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
