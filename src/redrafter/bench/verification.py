"""Ways to verify a drafted chain by p/q, for comparison: transformers' own, the paper's two, and ours."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from redrafter.core.rules.rejection import rejection_from_logits
from redrafter.kernels.verify import paper

Found = tuple[Tensor, Tensor]
"""New tokens (B, G+1) and how many of them (B,) were drafted; what comes after the next one has no meaning."""


@dataclass(frozen=True)
class Case:
    """One verification to do."""

    target: Tensor  # (B, G+1, V) raw logits
    draft: Tensor  # (B, G, V)
    tokens: Tensor  # (B, G) sampled from the draft's logits
    counts: Tensor  # (B,) how many of them are real
    seeds: Tensor  # (B,)
    positions: Tensor  # (B,)
    temperature: Tensor  # (B,) the same for all rows, above 0
    heat: float = 1.0  # the same as a number, which the host knows without waiting

    @property
    def bytes(self) -> int:
        return self.target.nbytes + self.draft.nbytes


def fused(case: Case) -> Found:
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
    """Logits over T. Fused folds that in; `generate` and the paper do it before they verify."""
    if case.heat == 1:
        return case
    return replace(case, target=case.target.float() / case.heat, draft=case.draft.float() / case.heat, heat=1.0)


def given_numbers(case: Case) -> tuple[Tensor, Tensor]:
    """What the paper's ways draw from torch's generator: coins, and exponentials as torch.multinomial draws them."""
    device = case.target.device
    race = torch.empty(len(case.tokens), case.target.shape[-1], device=device).exponential_()
    return torch.rand(case.tokens.shape, device=device), race


def paper_exact(case: Case) -> Found:
    case = tempered(case)
    return paper.paper_exact(case.target, case.draft, case.tokens, case.counts, *given_numbers(case))


def sigmoid_lossy(case: Case, scale: tuple[float, float] = paper.TEXT) -> Found:
    """LOSSY."""
    case = tempered(case)
    return paper.sigmoid_lossy(case.target, case.draft, case.tokens, case.counts, *given_numbers(case), scale)


OWN = inspect.signature(_speculative_sampling).parameters


def transformers_own(case: Case) -> Found:
    """Its function as it is: one row, every drafted token real. It waits for the host."""
    older = {"is_done_candidate": False} if "is_done_candidate" in OWN else {}
    new, accepted = _speculative_sampling(case.tokens, case.draft, case.tokens.shape[1], case.target, **older)
    return new, accepted[None]


def transformers_batched(case: Case) -> Found:
    """Its function, statement by statement, for many rows and without waiting for the host, which can only help it."""
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
    drawn = (p_prime / torch.empty_like(p_prime).exponential_()).argmax(-1)  # as torch.multinomial, less its checks
    new = torch.cat([case.tokens, drawn[:, None]], 1)
    return new.scatter(1, n_matches[:, None], drawn[:, None]), n_matches


def baseline(case: Case) -> Found:
    """As `generate` calls it: fp32, T before it."""
    case = tempered(case)
    case = replace(case, target=case.target.float(), draft=case.draft.float())
    return transformers_own(case) if len(case.tokens) == 1 else transformers_batched(case)


def ways(scale: tuple[float, float]) -> dict[str, Callable[[Case], Found]]:
    return {
        "baseline": baseline,
        "paper_exact": paper_exact,
        "sigmoid_lossy": lambda case: sigmoid_lossy(case, scale),
        "fused": fused,
    }


def bytes_moved(way: str, gamma: int, vocab: int, size: int, heat: float, refused: bool) -> int:
    """Bytes of one row that a way reads and writes, counted array by array as its statements have them.

    `size` is that of a logit as the models give it; probabilities have 4. Where it refused, a row of q is needed too.

    >>> bytes_moved("fused", 5, 128256, 2, 1.0, refused=True) == 2 * (2 * 5 + 2) * 128256
    True
    """
    rows = 2 * gamma + 1
    if way == "fused":
        return size * vocab * (rows + refused)
    cast = 0 if heat == 1 else (size + 8) * rows  # to fp32, then over T in place of it
    logit = size if heat == 1 else 4
    if way == "baseline":  # to fp32; softmax; p - q, clamp, sum, over the sum; the draw
        cast = cast or (size + 4) * rows
        return vocab * (cast + 8 * rows + (12 + 8 + 4 + 8) * refused + 4)
    if way == "paper_exact":  # softmax; tau and a from p and q; a over b; numbers of the race; the draw
        return vocab * (cast + (logit + 4) * rows + 16 * gamma + 8 + 4 + 8)
    return vocab * (cast + (2 * logit + 8) * gamma + (logit + 4 + 8) + 8 + 4 + 8)  # the same without p and q
