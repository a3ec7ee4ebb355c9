"""Launches Triton kernels, those of decoder layers and of drafts without a gap between them; or only compiles them.

Programmatic dependent launch: a kernel's programs start while the kernel before it still runs. Such a kernel has a
parameter EARLY and calls `wait_for_previous` before it reads or writes what the kernel before it may still use. Only
tree attention does anything earlier; its docstrings say why that is safe.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redrafter.kernels import compiles_only


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait for the end of the kernel before, then let the next kernel's programs start.

    In this order only one kernel waits behind the running one. In the other order, the programs of a whole chain of
    kernels could take multiprocessors before their turn.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **settings: Any) -> None:
    """Launch a kernel that has a parameter EARLY. GPUs from compute capability 9.0 on can start it early."""
    early = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    submit(kernel, grid, *args, **settings, **({"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}))


def submit(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a kernel; while `compile_kernels` is under way, only compile it."""
    if compiles_only():
        kernel.warmup(*args, grid=grid, **settings)
    else:
        kernel[grid](*args, **settings)


def indices(*shape: int, device: torch.device) -> Tensor:
    """Memory for a kernel to write tokens or places to. Zeros where no kernel runs: others use them as indices."""
    made = torch.zeros if compiles_only() else torch.empty
    return made(shape, dtype=torch.long, device=device)
