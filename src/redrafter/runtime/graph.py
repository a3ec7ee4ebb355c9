"""Work that a GPU repeats without the host launching its kernels one by one."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch


class Replays(Protocol):
    """A recorded action."""

    def replay(self) -> None: ...


class Unrecorded:
    """An action in place of its graph, where there is no GPU."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.replay = action


@cache
def _side(device: int) -> torch.cuda.Stream:
    """One for all recordings: memory that was freed on a stream is used again on that one alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Moments:
    """When the parts of a launch ended, by the clock of the device; without a GPU by that of this thread."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.at: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """What was launched before ends here."""
        if not self.on_gpu:
            self.at.append(time.thread_time())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.at.append(event)

    def seconds(self) -> list[float]:
        """Of each part. Waits for the last one."""
        if not self.on_gpu:
            return [after - before for before, after in pairwise(self.at)]
        self.at[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self.at)]


def new_memory(device: torch.device) -> Any:
    """Working memory for recordings that never run at once. A recording that fails makes its memory unusable."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def unrecorded(actions: Sequence[Callable[[], None]]) -> list[Replays]:
    """As `recorded`, where there is no GPU: the actions run once, and each replay runs one again."""
    for action in actions:
        action()
    return [Unrecorded(action) for action in actions]


def recorded(actions: Sequence[Callable[[], None]], memory: Any = None) -> list[Replays]:
    """One graph for each action, over the tensors it uses now. All run twice before, to compile and tune, not after.

    Graphs that never run at once may share their working memory. A later action may use what an earlier one keeps.
    """
    side = _side(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    many = torch._dynamo.config.patch(recompile_limit=64)  # one code for every kind of batch
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed during the recording would end the recording
    graphs: list[Replays] = []
    try:
        with many, torch.cuda.stream(side):
            for _ in range(2):
                for action in actions:
                    action()
            side.synchronize()
            for action in actions:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=side):
                    action()
                graphs.append(graph)
    finally:
        if collects:
            gc.enable()
        torch.cuda.current_stream().wait_stream(side)
    return graphs
