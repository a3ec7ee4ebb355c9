"""Beam search over any network that can be advanced token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from redrafter_mlx.chain import Chain, append_chain, mix
from redrafter_mlx.errors import ConfigError
from redrafter_mlx.tree import Nodes, gather

Advance = Callable[[Any, mx.array, mx.array], tuple[mx.array, Any]]
"""advance(state, tokens (B, w), parents (B, w)) -> logits (B, w, V'), state of these w beams.

`parents` are indices into the beams of the given state; tokens are target token ids.
"""


@dataclass(frozen=True)
class Beam:
    """Every node that a beam search visited, best first at each depth."""

    tokens: mx.array  # (B, L, W) target token ids
    parents: mx.array  # (B, L, W) index of the parent among the W of the depth before
    scores: mx.array  # (B, L, W) fp32 log-probability of the path
    follows: mx.array | None = None  # (B, W) bool: which path of the last depth has followed the chain all along


def top(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest values along the last axis and their indices, best first."""
    if count == 1:
        index = x.argmax(-1, keepdims=True)
    else:
        some = mx.argpartition(-x, count - 1, axis=-1)[..., :count]
        order = mx.argsort(-mx.take_along_axis(x, some, axis=-1), axis=-1)
        index = mx.take_along_axis(some, order, axis=-1)
    return mx.take_along_axis(x, index, axis=-1), index.astype(mx.int32)


def extend(
    scaled: mx.array, total: mx.array, noise: mx.array | None, token_ids: mx.array | None, width: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Logits / T (B, w, V') of w beams with scores `total` (B, w) -> the W best paths: scores, parents, tokens (B, W).

    A path's score grows by log_softmax(logits / T + noise), where the noise (B, V) is gathered by target id.
    """
    if noise is not None:
        scaled = scaled + (noise if token_ids is None else mx.take(noise, token_ids, axis=1))[:, None]
    best, ids = top(scaled, width)  # (B, w, W) the best of each beam; then of all
    every = (total - mx.logsumexp(scaled, axis=-1))[..., None] + best
    total, flat = top(every.reshape(every.shape[0], -1), width)
    tokens = gather(ids.reshape(ids.shape[0], -1), flat)
    return total, flat // width, tokens if token_ids is None else token_ids[tokens]


def beam_search(
    advance: Advance,
    state: Any,
    last: mx.array,
    *,
    width: int,
    length: int,
    temperature: float,
    noise: mx.array | None,
    token_ids: mx.array | None = None,
    chain: Chain | None = None,
) -> Beam:
    """Guess `length` tokens after `last` (B,), following the `width` best paths.

    `noise` (B, L+1, V) is the noise that the target will choose with, None at temperature 0. Under the same noise the
    drafter tends to choose what the target chooses. `token_ids` (V',) maps a draft vocabulary to target ids; a `chain`
    of tokens is mixed in.
    """
    tokens, parents = last[:, None], mx.zeros((last.shape[0], 1), dtype=mx.int32)
    total = mx.zeros((last.shape[0], 1))
    follows = None if chain is None else mx.ones(parents.shape, dtype=mx.bool_)
    found: list[tuple[mx.array, mx.array, mx.array]] = []
    for depth in range(length):
        logits, state = advance(state, tokens, parents)
        if width > logits.shape[-1]:
            raise ConfigError(f"beam width {width} is larger than the {logits.shape[-1]} tokens to guess among")
        scaled = logits.astype(mx.float32) / (temperature or 1.0)
        here = None if noise is None else noise[:, depth]
        if chain is None or follows is None or depth >= chain.length:
            total, parents, tokens = extend(scaled, total, here, token_ids, width)
            follows = None
        else:
            token = chain.tokens[:, depth]
            mixed = mix(scaled, here, total, token_ids, token, chain.odds[:, depth], follows)
            lowered = total + follows * mixed.shift[:, None]
            best, parents, tokens = extend(scaled, lowered, here, token_ids, width)
            found_too = mixed.mixes[:, None] & (parents == mixed.beam) & (tokens == token[:, None])
            best = mx.where(found_too, -mx.inf, best)  # the chain's token replaces what the beam found as well
            best = mx.concatenate([best, mx.where(mixed.mixes, mixed.score, -mx.inf)[:, None]], axis=1)
            index = mx.arange(width + 1)  # a stable sort of W + 1 values: rows without a chain keep their order
            tied = (best[:, None, :] == best[:, :, None]) & (index[None, :] < index[:, None])
            rank = ((best[:, None, :] > best[:, :, None]) | tied).astype(mx.int32).sum(-1)
            order = (rank[:, None, :] == mx.arange(width)[:, None]).astype(mx.int32).argmax(-1)
            total = gather(best, order)
            parents = gather(mx.concatenate([parents, mixed.beam.astype(mx.int32)], axis=1), order)
            tokens = gather(mx.concatenate([tokens, token[:, None]], axis=1), order)
            follows = mixed.mixes[:, None] & (order == width)
        found.append((tokens, parents, total))
    all_tokens, all_parents, scores = (mx.stack(x, axis=1) for x in zip(*found, strict=True))
    return Beam(all_tokens, all_parents, scores, follows)


def visited_nodes(beam: Beam, chain: Chain | None = None) -> Nodes:
    """All W·L visited nodes, and the chain's tokens beyond the beam. Unique: a beam holds each (parent, token) once."""
    batch, length, width = beam.tokens.shape
    depth = mx.arange(length)[:, None]
    parents = mx.where(depth == 0, 0, 1 + (depth - 1) * width + beam.parents)
    nodes = Nodes(
        tokens=beam.tokens.reshape(batch, -1),
        parents=parents.reshape(batch, -1),
        depths=mx.broadcast_to(depth + 1, (batch, length, width)).reshape(batch, -1),
        scores=beam.scores.reshape(batch, -1),
        length=length,
    )
    if chain is None or beam.follows is None:
        return nodes
    return append_chain(nodes, chain, beam.follows, beam.scores[:, -1])
