"""Hand-written operators, one folder each: `naive.py` is the oracle in plain torch, `triton.py` or C++ is the fast way.

Each operator's own function picks its implementation by asking `runs_triton` or `runs_cpp`: which one a device gets is
decided here and nowhere else. What a fast implementation cannot do (a dtype, a shape) its operator sends to the oracle.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal

import torch

from redrafter.kernels.cpu.library import library

Implementation = Literal["triton", "cpp", "naive"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_forced: Implementation | None = None
_compiles_only = ContextVar("compiles_only", default=False)  # other threads' kernels run meanwhile


def runs_triton(device: torch.device) -> bool:
    """Whether tensors on `device` use Triton kernels: on CUDA, where Triton is installed."""
    if _forced is not None:
        return _forced == "triton"
    return device.type == "cuda" and _HAS_TRITON


def runs_cpp(device: torch.device) -> bool:
    """Whether tensors on `device` use the C++ of kernels/cpu: on a CPU, where its library is there or compiles."""
    if _forced is not None:
        return _forced == "cpp"
    return device.type == "cpu" and library() is not None


@contextlib.contextmanager
def force(implementation: Implementation) -> Iterator[None]:
    """Every operator uses this implementation, whatever the device: for tests and benchmarks that compare them."""
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


def compile_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Compile the Triton kernels that `run` launches on a GPU, many at once, without running them.

    What the kernels would write is arbitrary then. Errors are left to the real run. Kernels that were compiled before
    are not compiled again.
    """
    if device.type != "cuda" or not runs_triton(device):
        return
    from concurrent.futures import ThreadPoolExecutor

    import triton

    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor() as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        token = _compiles_only.set(True)
        try:
            run()
        finally:
            _compiles_only.reset(token)


def compiles_only() -> bool:
    """Whether `compile_kernels` is under way: results mean nothing and are not to be compared or kept."""
    return _compiles_only.get()
