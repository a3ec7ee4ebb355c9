"""The paper's tiles in plain torch (the oracle of triton.py), and the steps after them."""

import torch
from torch import Tensor


def at(rows: Tensor, n: Tensor) -> Tensor:
    """Return row n (B,) of each batch entry: (B, m, V) -> (B, V)."""
    return rows[torch.arange(len(n), device=n.device), n]


def approximate(logits: Tensor, scale: tuple[float, float]) -> Tensor:
    """LOSSY: sigmoid((z - alpha) / (beta - alpha)), the paper's equation 5.

    >>> approximate(torch.tensor([-10.0, 10.0]), (-1e3, 1e3)).mul(1000).round().tolist()  # far from e^20 apart
    [621.0, 624.0]
    """
    low, high = scale
    return ((logits.float() - low) / (high - low)).sigmoid()


def tiles(p: Tensor, q: Tensor, scale: tuple[float, float] | None) -> tuple[Tensor, Tensor, Tensor]:
    """p (B, G+1, V) and q (B, G, V), or their logits with a scale -> tau (B, G, V), a (B, G, V), b (B, G).

    tau = min(1, p/q), 0 where q = 0; a = max(0, p - q); b = sum of a.
    """
    p = p[:, : q.shape[1]]
    if scale is not None:
        p, q = approximate(p, scale), approximate(q, scale)
    ratio = torch.where(q > 0, p / q, 0.0).clamp(max=1)
    rest = (p - q).clamp(min=0)
    return ratio, rest, rest.sum(-1)


def stop(ratio: Tensor, tokens: Tensor, counts: Tensor, coins: Tensor) -> Tensor:
    """Return the number of accepted tokens (B,): those before the first with coin > tau."""
    hit = coins <= ratio.gather(2, tokens[..., None])[..., 0]
    hit = hit & (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None])
    return hit.int().cumprod(1).sum(1)


def draw(
    rest: Tensor, mass: Tensor, own: Tensor, tokens: Tensor, counts: Tensor, accepted: Tensor, race: Tensor
) -> Tensor:
    """Return the new tokens (B, G+1): the drafted ones, then one from a / b, or from `own` (B, V) if all passed."""
    last = accepted.clamp(max=tokens.shape[1] - 1)
    left = mass.gather(1, last[:, None])
    refused = (accepted < counts)[:, None] & (left > 0)
    drawn = (torch.where(refused, at(rest, last) / left, own) / race).argmax(-1)
    return torch.cat([tokens, drawn[:, None]], 1).scatter(1, accepted[:, None], drawn[:, None])
