"""Beam extension: the W best paths of a row that are one token longer. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.beam_topk import naive


def extend(
    logits: Tensor, total: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See naive.py."""
    if runs_triton(logits.device) and noise.dtype == torch.float32:
        found: tuple[Tensor, Tensor, Tensor] = _extend(logits, total, temperature, noise, token_ids, width)
        return found
    return naive.extend(logits, total, temperature, noise, token_ids, width)


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
    """See naive.py."""
    beams, chain = (logits, total, temperature, noise, token_ids, width), (token, odds, follows)
    if runs_triton(logits.device) and noise.dtype == torch.float32:
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _extend_with_chain(*beams, *chain)
        return found
    return naive.extend_with_chain(*beams, *chain)


@torch.library.custom_op("redrafter::extend", mutates_args=())
def _extend(
    logits: Tensor, total: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    from redrafter.kernels.beam_topk import triton

    return triton.extend(logits.contiguous(), total, temperature.contiguous(), noise, token_ids, width)[:3]


@torch.library.custom_op("redrafter::extend_with_chain", mutates_args=())
def _extend_with_chain(
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
    from redrafter.kernels.beam_topk import triton

    chain = triton.Chain(token.contiguous(), odds.float().contiguous(), follows)
    best, parents, tokens, still = triton.extend(
        logits.contiguous(), total, temperature.contiguous(), noise, token_ids, width, chain
    )
    assert still is not None
    return best, parents, tokens, still


@_extend.register_fake
def _(
    logits: Tensor, total: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    best = total.new_empty(total.shape[0], width)
    return best, best.new_empty(best.shape, dtype=torch.long), best.new_empty(best.shape, dtype=torch.long)


@_extend_with_chain.register_fake
def _(
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
    best = total.new_empty(total.shape[0], width)
    tokens, parents = (best.new_empty(best.shape, dtype=torch.long) for _ in range(2))
    return best, parents, tokens, best.new_empty(best.shape, dtype=torch.bool)
