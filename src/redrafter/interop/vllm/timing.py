"""Where the time of an engine's steps goes: on the host before drafting, launching it, waiting for it; on the GPU."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

log = logging.getLogger(__name__)


class Timing:
    """Logs medians in milliseconds after every `steps` steps with one number of requests; 0: measures nothing."""

    def __init__(self, steps: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps, self.on_gpu, self.clock = steps, device.type == "cuda", clock
        self.rows: dict[int, list[dict[str, float]]] = {}
        self.ended: float | None = None
        self.marks: list[float] = []
        self.events: list[Any] = []

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """One call that drafts for so many requests."""
        if not self.steps:
            yield
            return
        began, self.marks, self.events = self.clock(), [], []
        yield
        ended = self.clock()
        if len(self.marks) == 2 and self.ended is not None:
            found = {
                "engine": began - self.ended,
                "before": self.marks[0] - began,
                "launch": self.marks[1] - self.marks[0],
                "wait": ended - self.marks[1],
            }
            if self.events:
                self.events[1].synchronize()
                found["gpu"] = self.events[0].elapsed_time(self.events[1]) / 1000
            self._keep(rows, found)
        self.ended = self.clock()

    def watched(self, follow: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which marks when it begins and ends."""

        def timed(*args: Any) -> Any:
            self.marks = [self.clock()]
            self._event()
            found = follow(*args)
            self._event()
            self.marks.append(self.clock())
            return found

        return timed

    def _event(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.events.append(event)

    def _keep(self, rows: int, found: dict[str, float]) -> None:
        kept = self.rows.setdefault(rows, [])
        kept.append(found)
        if len(kept) < self.steps:
            return
        # A warning, because vLLM shows only warnings of other packages.
        parts = ", ".join(f"{name} {1000 * median(x[name] for x in kept):.3f}" for name in kept[0])
        log.warning("redrafter: ms of a step with %d requests: %s", rows, parts)
        kept.clear()
