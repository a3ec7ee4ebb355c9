"""From the logits of all beams to the W best paths that are one token longer: the oracle."""

import torch
from torch import Tensor


def draft_scores(logits: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None) -> Tensor:
    """log_softmax(logits / T + noise) with (B, V) noise gathered by target id; T = 0 divides by 1."""
    noise = noise if token_ids is None else noise[:, token_ids]
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None, None].to(noise.dtype)
    return (logits.to(noise.dtype) / scale + noise[:, None]).log_softmax(-1)


def extend(
    logits: Tensor, total: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, w, V') of w beams with scores `total` (B, w) -> scores, parents and tokens of the W best paths (B, W).

    >>> logits = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    >>> total = torch.tensor([[0.7, 0.3]]).log()
    >>> zero = torch.zeros(1, 2)
    >>> best, parents, tokens = extend(logits, total, torch.zeros(1), zero, None, width=2)
    >>> best.exp().mul(100).round().tolist(), parents.tolist(), tokens.tolist()
    ([[42.0, 28.0]], [[0, 0]], [[0, 1]])
    """
    scores = draft_scores(logits, temperature, noise, token_ids)
    best, ids = scores.topk(width, dim=-1)  # (B, w, W) the best of each beam; then of all
    total, flat = (total[..., None] + best).flatten(1).topk(width, dim=-1)
    tokens = ids.flatten(1).gather(1, flat)
    return total, flat // width, tokens if token_ids is None else token_ids[tokens]


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
