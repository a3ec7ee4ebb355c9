"""Beam search over any network that can be advanced token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.chain import Chain, append_chain
from redrafter.core.tree import Nodes
from redrafter.errors import ConfigError
from redrafter.kernels.beam_topk import extend, extend_with_chain

State = TypeVar("State")
Advance = Callable[[State, Tensor, Tensor], tuple[Tensor | None, State]]
"""advance(state, tokens (B, w), parents (B, w)) -> logits (B, w, V'), state of these w beams.

`parents` are indices into the beams of the given state; tokens are target token ids. Logits None: end of the draft.
"""


@dataclass(frozen=True)
class Beam:
    """Every node that a beam search visited, best first at each depth."""

    tokens: Tensor  # (B, L, W) target token ids
    parents: Tensor  # (B, L, W) index of the parent among the W of the depth before
    scores: Tensor  # (B, L, W) fp32 (or fp64) log-probability of the path
    follows: Tensor | None = None  # (B, W) bool: which path of the last depth has followed the chain all along


Grow = Callable[[Shape, Tensor, Tensor | None, Chain | None], Beam]
"""grow(shape, temperature (B,), noise (B, L or more, V) or None for no noise, chain): the search at once.

A drafter that has a faster way than `beam_search` over its `advance` offers this. The result must be the same search,
or the beginning of it where the shape's `until` ends it.
"""


def beam_search(
    advance: Advance[State],
    state: State,
    last: Tensor,
    *,
    width: int,
    length: int,
    temperature: Tensor,
    noise: Tensor,
    token_ids: Tensor | None = None,
    chain: Chain | None = None,
    ends: Callable[[Tensor], bool] | None = None,
) -> Beam:
    """Guess `length` tokens after `last` (B,), following the `width` best paths.

    `noise` (B, L+1, V) is the noise that the target will choose with, 0 at temperature 0. Under the same noise the
    drafter tends to choose what the target chooses. `token_ids` (V',) maps a draft vocabulary to target ids; a `chain`
    of tokens is mixed in. The beam is shorter if `advance` ends it, or `ends`, which is shown the scores (B, width) of
    each depth.
    """
    tokens, parents = last[:, None], torch.zeros_like(last)[:, None]
    total = noise.new_zeros(last.shape[0], 1)
    follows = None if chain is None else torch.ones_like(parents, dtype=torch.bool)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for depth in range(length):
        logits, state = advance(state, tokens, parents)  # (B, w, V')
        if logits is None:
            break
        if width > logits.shape[-1]:
            raise ConfigError(f"beam width {width} is larger than the {logits.shape[-1]} tokens to guess among")
        beams = (logits, total, temperature, noise[:, depth], token_ids, width)
        if chain is None or follows is None or depth >= chain.length:
            (total, parents, tokens), follows = extend(*beams), None
        else:
            here = (chain.tokens[:, depth], chain.odds[:, depth], follows)
            total, parents, tokens, follows = extend_with_chain(*beams, *here)
        found.append((tokens, parents, total))
        if ends is not None and ends(total):
            follows = None  # the rest of a chain is too unlikely as well
            break
    all_tokens, all_parents, scores = (torch.stack(x, dim=1) for x in zip(*found, strict=True))
    return Beam(all_tokens, all_parents, scores, follows)


def visited_nodes(beam: Beam, chain: Chain | None = None) -> Nodes:
    """All W·L visited nodes, and the chain's tokens beyond the beam. Unique: a beam holds each (parent, token) once."""
    batch, length, width = beam.tokens.shape
    depth = torch.arange(length, device=beam.tokens.device)[:, None]
    parents = torch.where(depth == 0, 0, 1 + (depth - 1) * width + beam.parents)
    nodes = Nodes(
        tokens=beam.tokens.flatten(1),
        parents=parents.flatten(1),
        depths=(depth + 1).expand(length, width).reshape(1, -1).expand(batch, -1),
        scores=beam.scores.flatten(1),
        length=length,
    )
    if chain is None or beam.follows is None:
        return nodes
    return append_chain(nodes, chain, beam.follows, beam.scores[:, -1])


def candidates(beam: Beam) -> Tensor:
    """The final paths (B, W, L), best first: the papers' beam."""
    length = beam.tokens.shape[1]
    at = torch.arange(beam.tokens.shape[2], device=beam.tokens.device).expand_as(beam.tokens[:, 0])
    path = []
    for depth in reversed(range(length)):
        path.append(beam.tokens[:, depth].gather(1, at))
        at = beam.parents[:, depth].gather(1, at)
    return torch.stack(path[::-1], dim=-1)
