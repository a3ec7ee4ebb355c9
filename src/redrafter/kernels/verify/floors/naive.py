"""What top-k, top-p and min-p keep, by sorting each row: the oracle."""

import torch
from torch import Tensor

from redrafter.kernels.verify.naive import tempered


def smallest(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, sorts: bool = True
) -> Tensor:
    """(B, n, V) raw logits -> (B, n) the smallest logit that top-k, then top-p, then min-p keep.

    Logits that are equal after the division by T are kept or dropped together.

    >>> logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    >>> one, off = torch.ones(1), torch.zeros(1)
    >>> smallest(logits, one, torch.tensor([3]), torch.tensor([0.8]), off).exp().mul(100).round().tolist()
    [[30.0]]
    """
    scores = tempered(logits, temperature, None)
    edge = scores.amax(-1, keepdim=True) + min_p[:, None, None].to(scores.dtype).log()
    if sorts:
        ordered = scores.sort(dim=-1, descending=True).values
        rank = torch.arange(scores.shape[-1], device=scores.device)
        in_top_k = rank < top_k[:, None, None]
        probability = ordered.masked_fill(~in_top_k, -torch.inf).softmax(-1)
        before = probability.cumsum(-1) - probability  # mass of the more probable tokens
        kept = (in_top_k & (before < top_p[:, None, None].to(scores.dtype))).sum(-1, keepdim=True)
        edge = torch.maximum(edge, ordered.gather(-1, (kept - 1).clamp(min=0)))
    dropped = (scores < edge) | (scores == -torch.inf)
    raw = logits if logits.dtype == torch.float64 else logits.float()
    return raw.masked_fill(dropped, torch.inf).amin(-1)
