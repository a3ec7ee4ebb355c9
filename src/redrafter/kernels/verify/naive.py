"""Verification in plain torch, from given random numbers: the oracle of `seeded` and `fused`."""

from collections.abc import Callable

import torch
from torch import Tensor

NEAR, STRETCH, SPAN = 8, 1024, 4096
CELL = NEAR * SPAN // STRETCH
"""Tokens of a cell, which `drawn` draws before a token: NEAR neighbours in each STRETCH of a SPAN, one GPU thread's."""


def tempered(logits: Tensor, temperature: Tensor, floor: Tensor | None) -> Tensor:
    """(B, n, V) logits -> logits / T, -inf where a logit is below its row's floor (B, n); T = 0 divides by 1."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if floor is not None:
        logits = logits.masked_fill(logits < floor[..., None], -torch.inf)
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None, None].to(logits.dtype)


def seeded(logits: Tensor, depths: Tensor, temperature: Tensor, noise: Tensor, floor: Tensor | None) -> Tensor:
    """Logits (B, n, V) of tree nodes and noise (B, L+1, V) by depth -> (B, n) the target's choice at each node."""
    scores = tempered(logits, temperature, floor)
    there = noise.gather(1, depths[:, :, None].expand_as(scores)).to(scores.dtype)
    return torch.where(temperature[:, None, None] > 0, scores + there, scores).argmax(-1)


def residual(logp: Tensor, logq: Tensor) -> Tensor:
    """log (p - q)+, not normalised; log p where nothing is left.

    >>> p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    >>> residual(p.log(), q.log()).exp().mul(10).round().tolist()
    [3.0, 0.0, 0.0]
    >>> residual(p.log(), p.log()).exp().mul(10).round().tolist()
    [5.0, 3.0, 2.0]
    """
    rest = torch.where(logp > logq, logp + torch.log1p(-(logq - logp).exp()), -torch.inf)
    return torch.where((rest > -torch.inf).any(-1, keepdim=True), rest, logp)


def filled(vocab: int) -> tuple[int, int]:
    """Stretch and span for a vocabulary; shorter for a small one, whose cells would be mostly empty."""
    stretch = min(STRETCH, -(-vocab // NEAR) * NEAR)
    return stretch, SPAN if vocab > STRETCH else stretch


def numbers(vocab: int) -> int:
    """How many random numbers `drawn` takes: one per place in a cell, then one per cell."""
    stretch, span = filled(vocab)
    return CELL + -(-vocab // span) * stretch // NEAR


def drawn(logw: Tensor, noise: Tensor) -> Tensor:
    """(B, V) logarithms of weights -> (B,) tokens, by Gumbel-max in two steps: a cell, then a token of it.

    The maximum of several Gumbel variables is a Gumbel variable with their summed weight, so the result has the same
    distribution as a draw in one step. The noise (B, `numbers`) has one number per cell and per place in a cell, not
    one per token.
    """
    stretch, span = filled(logw.shape[1])
    every = torch.nn.functional.pad(logw, (0, -logw.shape[1] % span), value=-torch.inf)
    cells: Tensor = every.view(len(logw), -1, span // stretch, stretch // NEAR, NEAR).transpose(2, 3).flatten(3)
    cells = cells.flatten(1, 2)
    cell = (cells.logsumexp(-1) + noise[:, CELL:]).argmax(-1)
    inside = cells[torch.arange(len(cell), device=cell.device), cell]
    place = (inside + noise[:, : inside.shape[1]]).argmax(-1)
    of_span, in_span = cell // (stretch // NEAR) * span, cell % (stretch // NEAR) * NEAR
    return of_span + in_span + place // NEAR * stretch + place % NEAR


def fused(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    counts: Tensor,
    temperature: Tensor,
    coins: Tensor,
    noise: Callable[[Tensor], Tensor],
    floors: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The p/q test of drafted tokens (B, G), `counts` (B,) of them real -> new tokens (B, G+1), how many are accepted.

    Logits: target (B, G+1, V), draft (B, G, V). Tokens are accepted for as long as coin < p(x)/q(x), `coins` (B, G).
    If n are accepted, the n-th new token is drawn under `noise(n)`: from (p - q)+ after a refusal, from p after the
    last drafted token. Later entries are meaningless. Rows at T = 0 accept the target's best tokens and end with one.
    """
    gamma = tokens.shape[1]
    p = tempered(target, temperature, None if floors is None else floors[0])
    q = tempered(draft, temperature, None if floors is None else floors[1])
    logp, logq = p.log_softmax(-1), q.log_softmax(-1)
    lp, lq = (x[:, :gamma].gather(2, tokens[..., None])[..., 0] for x in (logp, logq))
    # A difference of logarithms: where p = q it is exactly 0, and no coin below 1 refuses.
    hit = (coins.log() < lp - lq) & (lq > -torch.inf)
    greedy = temperature[:, None] <= 0
    hit = torch.where(greedy, tokens == p[:, :gamma].argmax(-1), hit)
    hit = hit & (torch.arange(gamma, device=tokens.device) < counts[:, None])
    accepted = hit.int().cumprod(1).sum(1)

    row = torch.arange(len(tokens), device=tokens.device)
    there = logp[row, accepted]  # (B, V)
    if gamma:
        rest = residual(there, logq[row, accepted.clamp(max=gamma - 1)])
        there = torch.where((accepted < counts)[:, None], rest, there)
    own = torch.where(greedy[:, 0], p[row, accepted].argmax(-1), drawn(there, noise(accepted).to(there.dtype)))
    new = torch.cat([tokens, own[:, None]], 1)
    return new.scatter(1, accepted[:, None], own[:, None]), accepted
