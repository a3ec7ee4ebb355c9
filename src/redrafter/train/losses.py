"""Losses at one depth, each with its gradient in closed form, so that logits need not be kept for backward.

All take logits (n, V') of the drafter, the target's probabilities p (n, V') over the same tokens and the
token written (n,), -1 where it cannot be guessed; and give values (n,) and the gradient (n, V').
"""

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]

TINY = 1e-6


def hard(logits: Tensor, p: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """−log q(token written); 0 where it cannot be guessed."""
    logq = logits.float().log_softmax(-1)
    known = label >= 0
    index = label.clamp(min=0)[:, None]
    value = torch.where(known, -logq.gather(1, index)[:, 0], 0.0)
    at_label = torch.arange(logits.shape[1], device=logits.device) == index
    return value, (logq.exp() - at_label.float()) * known[:, None]


def soft(logits: Tensor, p: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Cross-entropy of q under p: KL(p ‖ q) up to the entropy of p, which no drafter can change."""
    assert p is not None
    p = p.float()
    logq = logits.float().log_softmax(-1)
    return -(p * logq).sum(-1), logq.exp() - p


def acceptance(logits: Tensor, p: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """−log Σ min(p, q): how probable it is that a token drawn from q is accepted against p.

    With a = Σ min(p, q) and below = [q < p], ∂a/∂z = q (below − Σ q·below).
    """
    assert p is not None
    q = logits.float().softmax(-1)
    p = p.float()
    below = (q < p).float()
    a = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=TINY)
    inside = (q * below).sum(-1, keepdim=True)
    return -a.log()[:, 0], -q * (below - inside) / a


def seeded(logits: Tensor, p: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """−log of the probability that the beam gives to the target's choice where both are under the same Gumbel noise.

    This is what the beam search of the rule `seeded` sees at temperature 1. The target chooses argmax(log p + noise);
    the value is 0 where it chooses a token that cannot be guessed.
    """
    assert p is not None
    p = p.float()
    noise = -torch.log(torch.empty_like(p).exponential_().clamp(min=TINY**3))
    best, choice = (p.clamp(min=TINY**3).log() + noise).max(-1)
    other = (1 - p.sum(-1)).clamp(min=TINY**3).log() - torch.log(
        torch.empty_like(best).exponential_().clamp(min=TINY**3)
    )
    logq = (logits.float() + noise).log_softmax(-1)
    known = best > other
    index = choice[:, None]
    at_choice = torch.arange(logits.shape[1], device=logits.device) == index
    return -logq.gather(1, index)[:, 0] * known, (logq.exp() - at_choice.float()) * known[:, None]


LOSSES: dict[str, Loss] = {"hard": hard, "soft": soft, "acceptance": acceptance, "seeded": seeded}
