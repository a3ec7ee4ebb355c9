"""Methods to verify a drafted chain by rejection sampling: of transformers, of the paper (two), and ours."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from redrafter.bench import paper_kernels
from redrafter.core.rules.rejection import rejection_from_logits

Verified = tuple[Tensor, Tensor]
"""New tokens (B, G+1), and how many drafted tokens (B,) were accepted. Tokens after accepted + 1 have no meaning."""


@dataclass(frozen=True)
class Case:
    """The inputs of one verification."""

    target: Tensor  # (B, G+1, V) raw logits
    draft: Tensor  # (B, G, V)
    tokens: Tensor  # (B, G) sampled from the draft's logits
    counts: Tensor  # (B,) number of drafted tokens per row; the rest is padding
    seeds: Tensor  # (B,)
    positions: Tensor  # (B,)
    temperature: Tensor  # (B,) the same for all rows, above 0
    heat: float = 1.0  # the temperature as a Python number, so that the host need not synchronise

    @property
    def bytes(self) -> int:
        return self.target.nbytes + self.draft.nbytes


def fused(case: Case) -> Verified:
    return rejection_from_logits(
        case.target,
        case.draft,
        case.tokens,
        counts=case.counts,
        temperature=case.temperature,
        seeds=case.seeds,
        positions=case.positions,
    )


def tempered(case: Case) -> Case:
    """Divide the logits by T, as `generate` and the paper do before verification. `fused` does it inside the kernel."""
    if case.heat == 1:
        return case
    return replace(case, target=case.target.float() / case.heat, draft=case.draft.float() / case.heat, heat=1.0)


def random_numbers(case: Case) -> tuple[Tensor, Tensor]:
    """Draw the paper's random numbers: uniform numbers, and exponentials as torch.multinomial draws them."""
    device = case.target.device
    race = torch.empty(len(case.tokens), case.target.shape[-1], device=device).exponential_()
    return torch.rand(case.tokens.shape, device=device), race


def paper_exact(case: Case) -> Verified:
    case = tempered(case)
    return paper_kernels.paper_exact(case.target, case.draft, case.tokens, case.counts, *random_numbers(case))


def sigmoid_lossy(case: Case, scale: tuple[float, float] = paper_kernels.TEXT) -> Verified:
    """LOSSY: see `paper_kernels.sigmoid_lossy`."""
    case = tempered(case)
    return paper_kernels.sigmoid_lossy(case.target, case.draft, case.tokens, case.counts, *random_numbers(case), scale)


OWN = inspect.signature(_speculative_sampling).parameters


def transformers_own(case: Case) -> Verified:
    """Call transformers' function: one row without padding. It synchronises with the host."""
    older = {"is_done_candidate": False} if "is_done_candidate" in OWN else {}
    new, accepted = _speculative_sampling(case.tokens, case.draft, case.tokens.shape[1], case.target, **older)
    return new, accepted[None]


def transformers_batched(case: Case) -> Verified:
    """Batch transformers' function, statement by statement, without host synchronisation, which makes it faster."""
    gamma = case.tokens.shape[1]
    q, p = case.draft.softmax(-1), case.target.softmax(-1)
    q_i = q.gather(2, case.tokens[..., None])[..., 0]
    p_i = p[:, :gamma].gather(2, case.tokens[..., None])[..., 0]
    ratio = p_i / q_i
    is_accepted = torch.rand_like(ratio) <= ratio
    is_accepted = is_accepted & (torch.arange(gamma, device=p.device) < case.counts[:, None])
    n_matches = ((~is_accepted).cumsum(-1) < 1).sum(-1)
    row = torch.arange(len(n_matches), device=p.device)
    p_next = p[row, n_matches]
    p_prime = (p_next - q[row, n_matches.clamp(max=gamma - 1)]).clamp(min=0)
    p_prime = p_prime / p_prime.sum(-1, keepdim=True)
    p_prime = torch.where((n_matches < case.counts)[:, None], p_prime, p_next)
    drawn = (p_prime / torch.empty_like(p_prime).exponential_()).argmax(-1)  # as torch.multinomial, without its checks
    new = torch.cat([case.tokens, drawn[:, None]], 1)
    return new.scatter(1, n_matches[:, None], drawn[:, None]), n_matches


def baseline(case: Case) -> Verified:
    """Verify as `generate` does: in fp32, with the temperature applied before."""
    case = tempered(case)
    case = replace(case, target=case.target.float(), draft=case.draft.float())
    return transformers_own(case) if len(case.tokens) == 1 else transformers_batched(case)


def methods(scale: tuple[float, float]) -> dict[str, Callable[[Case], Verified]]:
    return {
        "baseline": baseline,
        "paper_exact": paper_exact,
        "sigmoid_lossy": lambda case: sigmoid_lossy(case, scale),
        "fused": fused,
    }


def bytes_moved(method: str, gamma: int, vocab: int, size: int, heat: float, rejected: bool) -> int:
    """Count the bytes that a method reads and writes for one row, array by array.

    `size` is the size of a logit in bytes; probabilities have 4 bytes. A rejection reads one more row of q.

    >>> bytes_moved("fused", 5, 128256, 2, 1.0, rejected=True) == 2 * (2 * 5 + 2) * 128256
    True
    """
    rows = 2 * gamma + 1
    if method == "fused":
        return size * vocab * (rows + rejected)
    cast = 0 if heat == 1 else (size + 8) * rows  # convert to fp32, then divide by T in place
    logit = size if heat == 1 else 4
    if method == "baseline":  # fp32; softmax; p - q, clamp, sum, division by the sum; sampling
        cast = cast or (size + 4) * rows
        return vocab * (cast + 8 * rows + (12 + 8 + 4 + 8) * rejected + 4)
    if method == "paper_exact":  # softmax; tau and a from p and q; a / b; exponentials; sampling
        return vocab * (cast + (logit + 4) * rows + 16 * gamma + 8 + 4 + 8)
    return vocab * (cast + (2 * logit + 8) * gamma + (logit + 4 + 8) + 8 + 4 + 8)  # the same without the softmax
