"""How long steps take on the device. The host does not wait for the device: a time is read once its step has ended."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch


class HostMoment:
    """A moment of a device that runs what it is given at once."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def passed(self) -> bool:
        return True

    def since(self, earlier: "HostMoment") -> float:
        return self.seconds - earlier.seconds


class GpuMoment:
    """The moment when the GPU has done what was launched so far."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def passed(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: "GpuMoment") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class StepClock:
    """Times the steps of an engine with overlapped scheduling: the host launches a step while the device still runs.

    A step's time begins at the end of the previous step. If a prompt was read in between, the time begins with the
    step's own first kernel. So every step is timed, also under load, where prompts come every few steps.
    """

    def __init__(self, moment: Callable[[], Any]) -> None:
        self.moment = moment
        self.open: deque[tuple[int, int, Any, Any]] = deque()  # rows, size, beginning, end
        self.last: Any = None  # the end of the step before, if nothing else ran since

    def began(self, rows: int, size: int) -> None:
        self.step = (rows, size, self.last or self.moment())

    def ended(self) -> None:
        self.last = self.moment()
        self.open.append((*self.step, self.last))

    def interrupted(self) -> None:
        self.last = None

    def times(self) -> Iterator[tuple[int, int, float]]:
        """Requests, size of tree and seconds of steps that have ended since the last call."""
        while self.open and self.open[0][3].passed():
            rows, size, beginning, end = self.open.popleft()
            yield rows, size, end.since(beginning)


def step_clock(device: torch.device | str) -> StepClock:
    return StepClock(GpuMoment if torch.device(device).type == "cuda" else HostMoment)
