"""Work that a GPU repeats without the host launching its kernels one by one."""

from collections.abc import Callable
from typing import Any

import torch


def recorded(action: Callable[[], None], memory: Any = None) -> torch.cuda.CUDAGraph:
    """The action as a graph, over the tensors it uses now. It runs twice before, to compile and tune, and not after.

    Graphs that never run at once may share their working memory.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    many = torch._dynamo.config.patch(recompile_limit=64)  # one code for every kind of batch
    with many, torch.cuda.stream(side):
        for _ in range(2):
            action()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=side):
            action()
    torch.cuda.current_stream().wait_stream(side)
    return graph
