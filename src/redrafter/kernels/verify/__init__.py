"""Verification of drafted tokens on a GPU; naive.py is the oracle of both ways.

They take seeds instead of random numbers, which core/verify.py makes for the oracle. A step that is being compiled
calls them as operators, whose shapes it can know beforehand; else the kernels are called at once, since for one row
an operator's own work on the host takes as long as a launch.
"""

from typing import Any

import torch
from torch import Tensor


def _seeded(
    logits: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floor: Tensor | None,
    stream: int,
) -> Tensor:
    """(B, n) the target's choice at each node, under the noise of (seed, position + 1 + depth)."""
    from redrafter.kernels.verify import triton

    rows = (temperature.float().contiguous(), seeds.contiguous(), positions.contiguous())
    return triton.seeded(logits, depths, *rows, floor, stream)


seeded_operator = torch.library.custom_op("redrafter::verify_seeded", _seeded, mutates_args=())


@seeded_operator.register_fake
def _(logits: Tensor, depths: Tensor, *rest: object) -> Tensor:
    return depths.new_empty(depths.shape, dtype=torch.long)


def _fused(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    target_floor: Tensor | None,
    draft_floor: Tensor | None,
    accept_stream: int,
    residual_stream: int,
) -> tuple[Tensor, Tensor]:
    """New tokens (B, G+1) and how many are accepted (B,)."""
    from redrafter.kernels.verify import triton

    rows = (counts.contiguous(), temperature.float().contiguous(), seeds.contiguous(), positions.contiguous())
    streams = (accept_stream, residual_stream)
    return triton.fused(target, draft, tokens, *rows, target_floor, draft_floor, streams)


fused_operator = torch.library.custom_op("redrafter::verify_fused", _fused, mutates_args=())


@fused_operator.register_fake
def _(target: Tensor, draft: Tensor, tokens: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, gamma = tokens.shape
    new = tokens.new_empty(batch, gamma + 1, dtype=torch.long)
    return new, new.new_empty(batch)


def seeded(*args: Any) -> Tensor:
    found: Tensor = (seeded_operator if torch.compiler.is_compiling() else _seeded)(*args)
    return found


def fused(*args: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = (fused_operator if torch.compiler.is_compiling() else _fused)(*args)
    return found
