"""The lines of rows' trees in a flat pass. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.flatten import host, naive


def flatten(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    real: Tensor,
    lengths: Tensor,
    places: Tensor,
    longest: int,
    lines: Tensor,
    runs: Tensor,
    begin: int,
) -> Tensor:
    """See naive.py."""
    run = _flatten if runs_triton(tokens.device) else host.flatten if tokens.device.type == "cpu" else naive.flatten
    at: Tensor = run(tokens, depths, mask, real, lengths, places, longest, lines, runs, begin)
    return at


@torch.library.custom_op("redrafter::flatten", mutates_args=("lines", "runs"))
def _flatten(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    real: Tensor,
    lengths: Tensor,
    places: Tensor,
    longest: int,
    lines: Tensor,
    runs: Tensor,
    begin: int,
) -> Tensor:
    from redrafter.kernels.flatten import triton

    return triton.flatten(tokens, depths, mask, real, lengths, places, longest, lines, runs, begin)


@_flatten.register_fake
def _(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    real: Tensor,
    lengths: Tensor,
    places: Tensor,
    longest: int,
    lines: Tensor,
    runs: Tensor,
    begin: int,
) -> Tensor:
    return tokens.new_empty(tokens.shape)
