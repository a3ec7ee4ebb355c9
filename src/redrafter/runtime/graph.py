"""Work that a GPU repeats without the host launching its kernels one by one."""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def _side(device: int) -> torch.cuda.Stream:
    """One for all recordings: memory that was freed on a stream is used again on that one alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def recorded(action: Callable[[], None], memory: Any = None) -> torch.cuda.CUDAGraph:
    """The action as a graph, over the tensors it uses now. It runs twice before, to compile and tune, and not after.

    Graphs that never run at once may share their working memory.
    """
    side = _side(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    many = torch._dynamo.config.patch(recompile_limit=64)  # one code for every kind of batch
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed during the recording would end the recording
    try:
        with many, torch.cuda.stream(side):
            for _ in range(2):
                action()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=side):
                action()
    finally:
        if collects:
            gc.enable()
        torch.cuda.current_stream().wait_stream(side)
    return graph
