"""Commit: move the accepted path to the slots right after a row's length, in the KV cache."""

import torch
from torch import Tensor

from redrafter.kernels import runs_cpp, runs_triton
from redrafter.kernels.commit import naive
from redrafter.kernels.cpu import naive as cpu_naive
from redrafter.kernels.cpu import ops


def commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """All layers at once: a cache (layers, 2, B, K, S, D). See naive.py."""
    # On a CPU, calling torch's operator would take longer than what it does.
    (_commit if cache.device.type == "cpu" else commit_op)(cache, lengths, path)


def _commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    if runs_triton(cache.device):
        from redrafter.kernels.commit import triton

        triton.commit(cache, lengths, path)
    elif runs_cpp(cache.device) and cache[0, 0, 0].is_contiguous():
        ops.move_path(cache.flatten(0, 1), lengths.contiguous(), path.contiguous())
    else:
        naive.commit(cache, lengths, path)


commit_op = torch.library.custom_op("redrafter::commit", _commit, mutates_args=("cache",))


@commit_op.register_fake
def _(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    return None


def commit_layer(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """The keys or the values of one layer: a cache (B, K, S, D)."""
    if runs_cpp(cache.device) and cache.is_contiguous():
        ops.move_path(cache, lengths.contiguous(), path.contiguous())
    else:
        cpu_naive.move_path(cache, lengths, path)
