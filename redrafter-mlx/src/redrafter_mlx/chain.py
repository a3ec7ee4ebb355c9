"""A chain of tokens from an earlier match in the text, mixed into a beam search.

The path that has followed the chain so far draws its next token from (1 - odds) · p_draft + odds · [the chain's token].
The score of a path is log_softmax(log of that mixture + noise), as for every other path. A node that both sources guess
is one node, and the beam branches off the chain by itself.
"""

from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.tree import Nodes, gather


@dataclass(frozen=True)
class Chain:
    """One guess of D tokens for each row."""

    tokens: mx.array  # (B, D) target token ids
    odds: mx.array  # (B, D) probability (< 1) of each token if all before it are right; 0: the row has no chain

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])

    def upto(self, length: int) -> "Chain":
        """The first tokens of the chain."""
        return Chain(self.tokens[:, :length], self.odds[:, :length])


def log_odds(odds: mx.array) -> mx.array:
    """log(odds), -inf at 0."""
    return mx.where(odds > 0, mx.log(mx.maximum(odds, 1e-38)), -mx.inf)


@dataclass(frozen=True)
class Mixture:
    """What mixing a chain's token into one beam of each row changes."""

    beam: mx.array  # (B, 1) the beam that follows the chain
    mixes: mx.array  # (B,) whether any does
    shift: mx.array  # (B,) added to the scores of all other tokens of this beam
    score: mx.array  # (B,) of the chain's token


def mix(
    plain: mx.array,
    noise: mx.array | None,
    total: mx.array,
    token_ids: mx.array | None,
    token: mx.array,
    odds: mx.array,
    follows: mx.array,
) -> Mixture:
    """`plain` (B, w, V') are logits / T, `total` (B, w) the beams' scores; `token`, `odds` (B,) are the chain's."""
    mixes = follows.any(1) & (odds > 0)
    beam = follows.astype(mx.int32).argmax(1, keepdims=True)
    plain = mx.take_along_axis(plain, beam[..., None], axis=1)[:, 0]  # (B, V')
    here = mx.zeros_like(odds) if noise is None else gather(noise, token[:, None])[:, 0]
    noisy = plain if noise is None else plain + (noise if token_ids is None else mx.take(noise, token_ids, axis=1))
    norm = mx.logsumexp(noisy, axis=-1)
    ids = mx.arange(plain.shape[1]) if token_ids is None else token_ids
    drafted = mx.where(ids == token[:, None], noisy, -mx.inf).max(-1) - norm  # -inf outside the draft vocabulary
    rest = mx.log1p(-odds) + norm - mx.logsumexp(plain, axis=-1)
    copied = log_odds(odds) + here
    whole = mx.logaddexp(rest, copied)
    shift = mx.where(mixes, rest - whole, 0.0)
    score = gather(total, beam)[:, 0] + mx.logaddexp(drafted + shift, copied - whole)
    return Mixture(beam, mixes, shift, score)


def append_chain(nodes: Nodes, chain: Chain, follows: mx.array, score: mx.array) -> Nodes:
    """Add the rest of the chain below the node of the last depth that followed it, if there is one.

    `follows` and `score` (B, W) are those of the last depth, whose nodes are the last W. A token beyond the beam's
    length is scored by its odds alone.
    """
    batch, total = nodes.tokens.shape
    width, start = follows.shape[1], nodes.length
    extra = chain.length - start
    if extra < 1:
        return nodes
    here = follows.astype(mx.int32).argmax(1, keepdims=True).astype(mx.int32)
    scores = gather(score, here) + mx.cumsum(log_odds(chain.odds[:, start:]), axis=1)
    first = 1 + total - width + here
    later = mx.broadcast_to(total + mx.arange(1, extra), (batch, extra - 1))
    depths = mx.broadcast_to(start + mx.arange(1, extra + 1), (batch, extra))
    return Nodes(
        tokens=mx.concatenate([nodes.tokens, chain.tokens[:, start:]], axis=1),
        parents=mx.concatenate([nodes.parents, first, later], axis=1),
        depths=mx.concatenate([nodes.depths, depths], axis=1),
        scores=mx.concatenate([nodes.scores, mx.where(follows.any(1, keepdims=True), scores, -mx.inf)], axis=1),
        length=chain.length,
    )
