"""A chain of tokens from another source, such as an earlier match in the text, mixed into a beam search.

The path that has followed the chain so far draws its next token from (1 - odds) · p_draft + odds · [the chain's token].
The score of a path is log_softmax(log of that mixture + noise), as for every other path (`kernels.beam_topk`). A node
that both sources guess is one node, and the beam branches off the chain by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.tree import Nodes


@dataclass(frozen=True)
class Chain:
    """One guess of D tokens for each row."""

    tokens: Tensor  # (B, D) target token ids
    odds: Tensor  # (B, D) probability below 1 of each token if all tokens before it are right; 0: the row has no chain

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def upto(self, length: int) -> "Chain":
        """The first tokens of the chain."""
        return Chain(self.tokens[:, :length], self.odds[:, :length])


def append_chain(nodes: Nodes, chain: Chain, follows: Tensor, score: Tensor) -> Nodes:
    """Add the rest of the chain below the node of the last depth that followed it, if there is one.

    `follows` and `score` (B, W) are those of the last depth, whose nodes are the last W. A token beyond the beam's
    length is scored by its odds alone.
    """
    batch, total = nodes.tokens.shape
    width, start = follows.shape[1], nodes.length
    extra = chain.length - start
    if extra < 1:
        return nodes
    here = follows.int().argmax(1, keepdim=True)  # (B, 1)
    odds = chain.odds[:, start:].to(score.dtype)
    scores = score.gather(1, here) + odds.log().cumsum(1)
    first = 1 + total - width + here
    later = (total + torch.arange(1, extra, device=first.device)).expand(batch, -1)
    depths = (start + torch.arange(1, extra + 1, device=first.device)).expand(batch, -1)
    return Nodes(
        tokens=torch.cat([nodes.tokens, chain.tokens[:, start:]], 1),
        parents=torch.cat([nodes.parents, first, later], 1),
        depths=torch.cat([nodes.depths, depths], 1),
        scores=torch.cat([nodes.scores, torch.where(follows.any(1, keepdim=True), scores, -torch.inf)], 1),
        length=chain.length,
    )
