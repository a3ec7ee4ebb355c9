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
