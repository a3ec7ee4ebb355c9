"""Kernels that begin before the one they wait for has ended: what does not depend on it can be asked for meanwhile."""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def early(device: torch.device) -> dict[str, bool]:
    """The arguments of a launch there (compute capability 9 and later can begin early)."""
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def after(EARLY: tl.constexpr):
    """From here on, what earlier kernels wrote is there. The next one may begin."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask(x, rows, row, last_row, size, LINE: tl.constexpr, LINES: tl.constexpr):
    """Have rows of `size` values fetched into the GPU's own cache, 128 bytes (LINE values) at a time."""
    at = tl.minimum(tl.arange(0, LINES) * LINE, size - 1)
    address = (x + tl.minimum(rows, last_row)[:, None].to(tl.int64) * row + at[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
