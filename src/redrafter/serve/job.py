"""One answer being written: what was asked, who listens, and what has been told so far."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.config import RuleConfig
from redrafter.engine.decode import Row as Host
from redrafter.engine.request import Part, Request
from redrafter.runtime.eager import Gain
from redrafter.runtime.row import Row, Written


@dataclass(frozen=True)
class Told:
    """What a listener hears after each pass; the last one has a finish reason or an error."""

    part: Part | None
    written: Written | None
    error: Exception | None = None

    @property
    def final(self) -> bool:
        return self.error is not None or (self.part is not None and self.part.finish_reason is not None)


class Job:
    """A request on its way through the scheduler, which alone changes it once it is submitted."""

    def __init__(
        self,
        request: Request,
        listener: Callable[[Told], None],
        *,
        tokenizer: Any = None,
        drafts: bool = True,
        logprobs: int | None = None,
        reuses: bool = True,
        processors: Sequence[Any] = (),
    ) -> None:
        self.request, self.listener, self.drafts, self.logprobs = request, listener, drafts, logprobs
        self.processors, self.reuses = processors, reuses
        self.host = Host(0, request, RuleConfig(), tokenizer)
        self.row: Row | None = None
        self.cancelled = self.finished = False
        self.submitted = time.perf_counter()
        self.first = self.last = 0.0  # when the first and the latest token came

    @property
    def reused(self) -> int:
        """Prompt tokens that another row had read."""
        return 0 if self.row is None else self.row.reused

    def take(self, written: Written) -> None:
        """Turn what a pass gave into text, and tell it; an error of this row, or of its listener, is its own."""
        if self.finished:
            return
        now = time.perf_counter()
        is_step = bool(self.first)
        self.first, self.last = self.first or now, now
        try:
            if written.error is not None:
                raise written.error
            gain = Gain([written.tokens], [written.drafted], [written.done], [written.nodes])
            part = self.host.take(gain, 0, now - self.submitted, is_step)
            self.finished = part.finish_reason is not None
            self.listener(Told(part, written))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        if self.finished:
            return
        self.finished = True
        try:
            self.listener(Told(None, None, error))
        except Exception:  # a listener that cannot even hear that: nobody is left to tell
            self.cancelled = True
