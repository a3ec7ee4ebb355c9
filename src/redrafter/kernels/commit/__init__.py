"""The accepted path moves to the front of the tree's slots, in all layers."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.commit import naive


@torch.library.custom_op("redrafter::commit", mutates_args=("cache",))
def commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """See naive.py."""
    if runs_triton(cache.device):
        from redrafter.kernels.commit import triton

        triton.commit(cache, lengths, path)
    else:
        naive.commit(cache, lengths, path)


@commit.register_fake
def _(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    return None
