"""A chain of tokens from another source, such as an earlier match in the text, mixed into a beam search.

The path that has followed the chain so far draws its next token from (1 - odds) · p_draft + odds · [the chain's token].
The score of a path is log_softmax(log of that mixture + noise), as for every other path (`kernels.beam_topk`). A node
that both sources guess is one node, and the beam branches off the chain by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.tree import Nodes
from redrafter.kernels.beam_topk import extend


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


def extend_with_chain(
    logits: Tensor,
    total: Tensor,
    temperature: Tensor,
    noise: Tensor,
    token_ids: Tensor | None,
    width: int,
    token: Tensor,
    odds: Tensor,
    follows: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`extend` where beam `follows` (B, w) has followed the chain, whose next token (B,) has these odds (B,).

    At most one beam of a row follows the chain. The mixture lowers the scores of all its tokens by the same amount,
    except for the chain's token. So `extend` runs with a lowered `total`, and the chain's token is one more candidate.
    Returns scores, parents and tokens (B, W), and which of them follow the chain. A row whose odds are 0, or whose
    beams have all left the chain, gets exactly what `extend` gives.
    """
    mixes = follows.any(1) & (odds > 0)  # (B,)
    beam = follows.int().argmax(1, keepdim=True)  # (B, 1)
    odds = odds.to(noise.dtype)
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None].to(noise.dtype)
    plain = logits.gather(1, beam[..., None].expand(-1, 1, logits.shape[2]))[:, 0].to(noise.dtype) / scale  # (B, V')
    noisy = plain + (noise if token_ids is None else noise[:, token_ids])
    norm = noisy.logsumexp(-1)
    ids = torch.arange(logits.shape[2], device=logits.device) if token_ids is None else token_ids
    drafted = noisy.masked_fill(ids != token[:, None], -torch.inf).amax(-1) - norm  # -inf outside the draft vocabulary
    rest = torch.log1p(-odds) + norm - plain.logsumexp(-1)
    copied = odds.log() + noise.gather(1, token[:, None])[:, 0]
    whole = torch.logaddexp(rest, copied)
    shift = torch.where(mixes, rest - whole, 0.0)
    score = total.gather(1, beam)[:, 0] + torch.logaddexp(drafted + shift, copied - whole)

    best, parents, tokens = extend(logits, total + follows * shift[:, None], temperature, noise, token_ids, width)
    on_chain = mixes[:, None] & (parents == beam) & (tokens == token[:, None])
    best = best.masked_fill(on_chain, -torch.inf)  # found by the beam as well: the candidate below replaces it
    best = torch.cat([best, torch.where(mixes, score, -torch.inf)[:, None]], 1)
    best, order = best.sort(dim=1, descending=True, stable=True)  # stable: rows without a chain keep their order
    best, order = best[:, :width], order[:, :width]
    parents = torch.cat([parents, beam], 1).gather(1, order)
    tokens = torch.cat([tokens, token[:, None]], 1).gather(1, order)
    return best, parents, tokens, mixes[:, None] & (order == width)


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
