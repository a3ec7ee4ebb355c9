"""The drafter's layers for the few rows of a beam on a GPU, a kernel each. See naive.py for what they compute."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton

ROWS = 64
"""More rows than this are torch's: its products use them better."""


def narrow(x: Tensor) -> bool:
    """Whether the kernels are for this: a beam on a GPU, not training."""
    few = x.numel() // x.shape[-1] <= ROWS
    return few and runs_triton(x.device) and x.dtype != torch.float64 and not torch.is_grad_enabled()


@torch.library.custom_op("redrafter::block", mutates_args=())
def block(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    from redrafter.kernels.narrow import triton

    return triton.block(x.contiguous(), weight, bias, normed)


@torch.library.custom_op("redrafter::joint", mutates_args=())
def joint(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    from redrafter.kernels.narrow import triton

    given = None if reading is None else reading.contiguous()
    return triton.joint(state.contiguous(), weight, share.contiguous(), given, columns)


@torch.library.custom_op("redrafter::cell", mutates_args=())
def cell(state: Tensor, weight: Tensor, bias: Tensor, heard: Tensor) -> Tensor:
    from redrafter.kernels.narrow import triton

    return triton.cell(state.contiguous(), weight, bias, heard.contiguous())


@torch.library.custom_op("redrafter::read", mutates_args=())
def read(query: Tensor, memory: Tensor) -> Tensor:
    from redrafter.kernels.narrow import triton

    return triton.read(query.contiguous(), memory.contiguous())


@block.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    return x.new_empty(x.shape)


@joint.register_fake
def _(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    return state.new_empty(*state.shape[:-1], weight.shape[0])


@cell.register_fake
def _(state: Tensor, weight: Tensor, bias: Tensor, heard: Tensor) -> Tensor:
    return state.new_empty(state.shape)


@read.register_fake
def _(query: Tensor, memory: Tensor) -> Tensor:
    return query.new_empty(query.shape)
