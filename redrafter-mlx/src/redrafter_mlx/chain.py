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
    scores = gather(score, here) + mx.cumsum(mx.log(chain.odds[:, start:]), axis=1)
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
