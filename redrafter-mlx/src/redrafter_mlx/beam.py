"""Beam search over any network that can be advanced token by token, and a chain of copied tokens mixed into it.

A chain comes from an earlier match in the text. The path that has followed it so far draws its next token from
(1 - odds) · p_draft + odds · [the chain's token]. The score of a path is log_softmax(log of that mixture + noise), as
for every other path. A node that both sources guess is one node, and the beam branches off the chain by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from redrafter_mlx.config import Shape, require
from redrafter_mlx.tree import Nodes, gather


@dataclass(frozen=True)
class Search:
    """How to guess in one step. Under the target's own noise the drafter tends to choose what the target chooses."""

    shape: Shape
    temperature: float
    noise: mx.array | None  # (B, L+1, V) of the positions after the last token; None at temperature 0


Advance = Callable[[Any, mx.array, mx.array], tuple[mx.array, Any]]
"""advance(state, tokens (B, w), parents (B, w)) -> logits (B, w, V'), state of these w beams; the first state is None.

`parents` are indices into the beams of the given state; tokens are target token ids.
"""


@dataclass(frozen=True)
class Chain:
    """One guess of D tokens for each row."""

    tokens: mx.array  # (B, D) target token ids
    odds: mx.array  # (B, D) probability (< 1) of each token if all before it are right; 0: the row has no chain


def top(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest values along the last axis and their indices, best first."""
    if count == 1:
        index = x.argmax(-1, keepdims=True)
    else:
        some = mx.argpartition(-x, count - 1, axis=-1)[..., :count]
        order = mx.argsort(-mx.take_along_axis(x, some, axis=-1), axis=-1)
        index = mx.take_along_axis(some, order, axis=-1)
    return mx.take_along_axis(x, index, axis=-1), index.astype(mx.int32)


def mix(scaled: mx.array, ids: mx.array, token: mx.array, odds: mx.array, follows: mx.array) -> mx.array:
    """Logits / T (B, w, V') of the tokens `ids` (V',) -> (B, w, V'+1), where the last column is the chain's token.

    `token` and `odds` (B, 1) are the chain's; `follows` (B, w): the beam that has followed it. Others do not change.
    """
    mixes = (follows & (odds > 0))[..., None]
    drafted = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True) + mx.log1p(-odds)[..., None]
    same = mixes & (ids == token)[:, None]  # the chain's token moves to the last column
    copied = mx.logaddexp(mx.where(same, drafted, -mx.inf).max(-1, keepdims=True), mx.log(odds)[..., None])
    rest = mx.where(same, -mx.inf, mx.where(mixes, drafted, scaled))
    return mx.concatenate([rest, mx.where(mixes, copied, -mx.inf)], axis=-1)


def extend(scaled: mx.array, total: mx.array, width: int) -> tuple[mx.array, mx.array, mx.array]:
    """Scores (B, w, V') of the next token -> the W best paths (B, W): scores, parents, and columns of their tokens.

    A path's score `total` (B, w) grows by log_softmax(scaled).
    """
    best, columns = top(scaled, width)  # (B, w, W) the best of each beam; then of all
    every = (total - mx.logsumexp(scaled, axis=-1))[..., None] + best
    total, flat = top(every.reshape(every.shape[0], -1), width)
    return total, flat // width, gather(columns.reshape(columns.shape[0], -1), flat)


def beam_search(
    advance: Advance, last: mx.array, search: Search, token_ids: mx.array | None = None, chain: Chain | None = None
) -> Nodes:
    """Guess what follows `last` (B,) -> all W·L visited nodes, and the chain's tokens beyond the beam.

    `token_ids` (V',) maps a draft vocabulary to target ids. Nodes are unique: a beam holds each (parent, token) once.
    """
    width, state, tokens = search.shape.width, None, last[:, None]
    parents = mx.zeros(tokens.shape, dtype=mx.int32)
    total, follows = mx.zeros(tokens.shape), parents == 0
    found: list[tuple[mx.array, ...]] = []
    for depth in range(search.shape.length):
        logits, state = advance(state, tokens, parents)
        size = logits.shape[-1]
        require(width <= size, f"beam width {width} is larger than the {size} tokens to guess among")
        ids = mx.arange(size) if token_ids is None else token_ids
        columns = mx.broadcast_to(ids, (last.shape[0], size))  # the token of each column of `scaled`
        scaled = logits.astype(mx.float32) / (search.temperature or 1.0)
        if chain is not None and depth < chain.tokens.shape[1]:
            copied, odds = chain.tokens[:, depth : depth + 1], chain.odds[:, depth : depth + 1]
            scaled = mix(scaled, ids, copied, odds, follows)
            columns = mx.concatenate([columns, copied], axis=1)
        if search.noise is not None:
            scaled = scaled + gather(search.noise[:, depth], columns)[:, None]
        total, parents, best = extend(scaled, total, width)
        tokens, follows = gather(columns, best), best == size
        above = 1 + (depth - 1) * width + parents if depth else parents
        found.append((tokens, above, mx.full(tokens.shape, depth + 1), total))
    every, above, depths, scores = (mx.concatenate(x, axis=1) for x in zip(*found, strict=True))
    nodes = Nodes(every, above, depths, scores, search.shape.length)
    return nodes if chain is None else append_chain(nodes, chain, follows)


def append_chain(nodes: Nodes, chain: Chain, follows: mx.array) -> Nodes:
    """Add the rest of the chain, scored by its odds alone, below the one of the last W nodes that follows (B, W) it."""
    batch, total = nodes.tokens.shape
    width, start = follows.shape[1], nodes.length
    extra = chain.tokens.shape[1] - start
    if extra < 1:
        return nodes
    here = follows.astype(mx.int32).argmax(1, keepdims=True).astype(mx.int32)
    scores = gather(nodes.scores[:, -width:], here) + mx.cumsum(mx.log(chain.odds[:, start:]), axis=1)
    first = 1 + total - width + here
    later = mx.broadcast_to(total + mx.arange(1, extra), (batch, extra - 1))
    depths = mx.broadcast_to(start + mx.arange(1, extra + 1), (batch, extra))
    return Nodes(
        tokens=mx.concatenate([nodes.tokens, chain.tokens[:, start:]], axis=1),
        parents=mx.concatenate([nodes.parents, first, later], axis=1),
        depths=mx.concatenate([nodes.depths, depths], axis=1),
        scores=mx.concatenate([nodes.scores, mx.where(follows.any(1, keepdims=True), scores, -mx.inf)], axis=1),
        length=start + extra,
    )
