"""One answer being written: the request, its listener, and the text so far."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.config import RuleConfig
from redrafter.engine.decode import RequestWriter
from redrafter.engine.exactness import Promise
from redrafter.engine.request import Part, Request
from redrafter.runtime.row import Row, RowOutput


@dataclass(frozen=True)
class Event:
    """What a listener is told after each pass; the last event has a finish reason or an error."""

    part: Part | None
    output: RowOutput | None
    error: Exception | None = None
    seconds: float = 0.0
    """Since the request came. `part.stats` may have gone on by the time a listener looks."""

    @property
    def final(self) -> bool:
        return self.error is not None or (self.part is not None and self.part.finish_reason is not None)


class Job:
    """A request on its way through the scheduler, which alone changes the job once it is submitted."""

    def __init__(
        self,
        request: Request,
        listener: Callable[[Event], None],
        *,
        tokenizer: Any = None,
        rule: RuleConfig | None = None,
        promise: Promise | None = None,
        drafts: bool = True,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        reuses: bool = True,
        processors: Sequence[Any] = (),
        owner: str = "",
        remembers: bool = True,
    ) -> None:
        """owner: who asks; what others have asked is not reused.

        remembers: the owner's past answers may be copied from, and this answer becomes one of them.
        """
        self.request, self.listener, self.drafts, self.logprobs = request, listener, drafts, logprobs
        self.reuses, self.prompt_logprobs = reuses, prompt_logprobs
        self.owner, self.remembers = owner, remembers
        self.writer = RequestWriter(0, request, rule or RuleConfig(), tokenizer, promise or Promise("ties"))
        self.processor = self.writer.processor(processors)
        self.row: Row | None = None
        self.cancelled = self.finished = False
        self.submitted = time.perf_counter()
        self.first = self.last = 0.0  # when the first and the latest token came

    @property
    def reused(self) -> int:
        """Prompt tokens copied from another row."""
        return 0 if self.row is None else self.row.reused

    def take(self, output: RowOutput) -> None:
        """Turn what a pass gave into text and tell the listener; an error fails this job alone."""
        if self.finished:
            return
        now = time.perf_counter()
        self.first, self.last = self.first or now, now
        try:
            if output.error is not None:
                raise output.error
            seconds = now - self.submitted
            part = self.writer.take(output, seconds)
            self.finished = part.finish_reason is not None
            self.listener(Event(part, output, seconds=seconds))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        if self.finished:
            return
        self.finished = True
        try:
            self.listener(Event(None, None, error))
        except Exception:  # the listener itself fails: nobody is left to tell
            self.cancelled = True
