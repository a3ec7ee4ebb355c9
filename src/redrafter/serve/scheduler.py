"""Continuous batching: which request gets a row, which prompt is read next, which rows step.

The scheduler knows rows and who plans their steps; it knows nothing of models. One thread runs the scheduler, any
thread may submit and cancel. A turn closes cancelled rows, admits from the queue, and launches a step, which reads
pieces of prompts in the same pass where the batch can.
On a GPU the results of a step are told to listeners while the next step runs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redrafter.bounds import Count, CountOrZero, check
from redrafter.errors import ConfigError, RedrafterError
from redrafter.planning.steps import Steps
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import AT_ONCE, MOST
from redrafter.runtime.row import Row, RowOutput
from redrafter.serve.job import Job
from redrafter.serve.metrics import Metrics
from redrafter.serve.past_answers import PastAnswers

log = logging.getLogger(__name__)


class QueueFull(RedrafterError):
    """No room in the queue; the request may be sent again later."""


class Draining(RedrafterError):
    """The server is about to stop."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much may wait, and how many prompt tokens are read in a step."""

    queue: CountOrZero = 64
    """Answers that may wait for a row; more are refused."""
    chunk: Count = 64
    """Prompt tokens read in a step of others, or before it, so that a long prompt does not stall them."""
    idle_chunk: Count = 512
    """The same while nobody else is waiting for a step."""

    def __post_init__(self) -> None:
        check(self)


class Scheduler:
    """Continuous batching. `start` runs it in a thread; `turn` by turn is for tests.

    policy: plans the steps.
    past: answers that rows may copy from; the batch needs room for them.
    """

    def __init__(
        self,
        batch: Batch,
        policy: Steps,
        limits: Limits | None = None,
        past: PastAnswers | None = None,
    ) -> None:
        self.batch, self.policy, self.limits = batch, policy, limits or Limits()
        self.past = past
        self.metrics = Metrics()
        self.lock = threading.Condition()
        self.queue: deque[deque[Job]] = deque()  # one entry a request, with those of its answers that wait
        self.waiting = 0
        self.jobs: dict[Row, Job] = {}  # open rows
        self.reading: deque[Row] = deque()
        self.draining = self.stopped = False
        self.thread: threading.Thread | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        """The answers to one request: all of them or none."""
        with self.lock:
            if self.draining or self.stopped:
                raise Draining("the server is shutting down and takes no new requests")
            if len(jobs) > self.limits.queue + self.batch.rows:
                raise ConfigError(
                    f"the request asks for {len(jobs)} answers (n for each prompt) and there is room for "
                    f"{self.limits.queue + self.batch.rows}"
                )
            if self.waiting + len(jobs) > self.limits.queue + max(0, self.batch.rows - len(self.jobs)):
                self.metrics.refused += 1
                raise QueueFull(
                    f"{self.waiting} answers are waiting and the queue holds {self.limits.queue}: try again later"
                )
            self.queue.append(deque(jobs))
            self.waiting += len(jobs)
            self.metrics.requests += 1
            self.lock.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these answers any more. They leave the queue at once; rows are free before the next step."""
        with self.lock:
            for job in jobs:
                job.cancelled = True
            self._leave_queue()
            self.lock.notify()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.jobs)

    def retry_after(self) -> int:
        """Seconds until a place may be free: how long an answer has taken, for each that waits before."""
        return max(1, round(self.metrics.answer_seconds() * (1 + self.waiting / max(1, self.batch.rows))))

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="redrafter-scheduler", daemon=True)
        self.thread.start()

    def stop(self, grace: float = 30.0) -> None:
        """Take nothing new, finish what can be within `grace` seconds, fail the rest, and end the thread."""
        with self.lock:
            self.draining = True
            self.lock.notify()
        until = time.monotonic() + grace
        while self.thread is not None and self.thread.is_alive() and not self.idle and time.monotonic() < until:
            time.sleep(0.02)
        with self.lock:
            self.stopped = True
            self.lock.notify()
        if self.thread is not None:
            self.thread.join()
        self._fail_everyone()

    def _run(self) -> None:
        try:
            while not self.stopped:
                with self.lock:
                    while self.idle and not self.stopped:
                        self.lock.wait()
                if self.stopped:
                    break
                self.turn()
        finally:  # whatever ended it, nobody waits in vain
            with self.lock:
                self.stopped = True
            self._fail_everyone()

    def turn(self) -> None:
        """One round; a failure that no single row is to blame for ends all rows, and serving goes on."""
        try:
            self._let_go()
            self._admit()
            self._step(self._read())
        except Exception as error:
            log.exception("a step failed; its rows are given up")
            self._give_up(error)

    def _let_go(self) -> None:
        """Cancelled and finished rows are freed."""
        with self.lock:
            self._leave_queue()
        for row, job in list(self.jobs.items()):
            if job.cancelled or job.finished:
                self._close(row, job)

    def _leave_queue(self) -> None:
        """Cancelled answers that wait for a row."""
        for group in list(self.queue):
            for job in [j for j in group if j.cancelled]:
                group.remove(job)
                self.waiting -= 1
                self._ended(job, "cancelled")
            if not group:
                self.queue.remove(group)

    def _admit(self) -> None:
        """In order of arrival; of a request with many answers one, then it is the others' turn."""
        while self.batch.free:
            with self.lock:
                if not self.queue:
                    return
                group = self.queue.popleft()
                job = group.popleft()
                if group:
                    self.queue.append(group)
            try:
                row = self.batch.open(
                    job.request,
                    drafts=job.drafts,
                    logprobs=job.logprobs,
                    prompt_logprobs=job.prompt_logprobs,
                    reuses=job.reuses,
                    processor=job.processor,
                    past=self._recall(job),
                )
            except Exception as error:
                job.fail(error)
                self._ended(job, "failed")
            else:
                job.row, row.owner = row, job.owner
                self.jobs[row] = job
                self.reading.append(row)
            with self.lock:
                self.waiting -= 1  # only now, so that `idle` is never true in between

    def _read(self) -> dict[Row, int]:
        """Pieces of prompts for the next step, in turns. Prompts that steps do not read are read here."""
        pieces: dict[Row, int] = {}
        most = self.limits.chunk if self.batch.live else self.limits.idle_chunk
        whole = left = min(most, MOST) if self.batch.reads_in_steps else most
        for _ in range(len(self.reading)):
            if 4 * left <= whole or len(pieces) == AT_ONCE:  # a few tokens take nearly as long as many
                break
            row = self.reading.popleft()
            self.batch.reuse(row)
            size = min(left, row.unread)
            left -= size
            if self.batch.reads_in_steps and row.asks_prompt is None:
                pieces |= {row: size} if size else {}
            else:
                self.batch.read(row, size)
            if row not in pieces:
                self._was_read(row)
        return pieces

    def _was_read(self, row: Row) -> None:
        """A part of this prompt, or all of it, was read; or nothing, if the step only waited for others."""
        if row.unread:
            self.reading.append(row)
        else:
            self.metrics.prompt(len(row.request.prompt), row.reused)

    def _step(self, pieces: dict[Row, int]) -> None:
        if not pieces and all(row.unread for row in self.jobs):
            return
        drafting = [row for row in self.jobs if row.drafts and row.unread <= pieces.get(row, 0)]
        results = self.policy.step(self.batch, drafting, pieces)
        for row in pieces:
            self._was_read(row)
        for result in results:
            gained = [(len(output.tokens), output.drafted) for _, output in result.rows if output.steps]
            if gained:  # else all its rows were closed in the meantime, or have just begun
                copied = any(output.nodes for _, output in result.rows)
                expected = sum(output.expected for _, output in result.rows)
                self.metrics.step(result.shape, result.label, gained, result.seconds, copied, expected)
            for row, output in result.rows:
                if not row.open:  # finished by an earlier step of the same results
                    continue
                job = self.jobs[row]
                if not output.steps and row.drafts:
                    self.policy.open(row)
                self._take(job, output)
                if not output.steps and job.first:  # else cancelled meanwhile
                    self.metrics.first_token.observe(job.first - job.submitted)
                if output.done or output.error is not None or job.finished:
                    self._close(row, job)

    def _take(self, job: Job, output: RowOutput) -> None:
        if job.finished or job.cancelled:
            return
        before = job.last
        job.take(output)
        if before and output.tokens:
            self.metrics.per_token.observe((job.last - before) / len(output.tokens), len(output.tokens))
        if job.finished:
            self._ended(job, job.writer.finish_reason or "failed")
            self._remember(job)

    def _recall(self, job: Job) -> Sequence[int]:
        if self.past is None or not job.remembers or not job.drafts:
            return ()
        found = self.past.text(job.owner, job.request.prompt)
        self.metrics.recalled += bool(found)
        return found

    def _remember(self, job: Job) -> None:
        """An answer that came to its end; one that was cancelled or failed is not kept."""
        if self.past is not None and job.remembers and job.writer.finish_reason is not None:
            self.past.add(job.owner, job.request.prompt, job.writer.ids[len(job.request.prompt) :])
            self.metrics.remembered = self.past.bytes

    def _close(self, row: Row, job: Job) -> None:
        self.batch.close(row)
        self.policy.close(row)
        del self.jobs[row]
        if row in self.reading:
            self.reading.remove(row)
        if job.cancelled and not job.finished:
            job.finished = True
            self._ended(job, "cancelled")

    def _ended(self, job: Job, how: str) -> None:
        self.metrics.ended(how, time.perf_counter() - job.submitted)

    def _fail_everyone(self) -> None:
        for job in list(self._everyone()):
            job.fail(Draining("the server shut down before the answer was finished"))

    def _everyone(self) -> Iterator[Job]:
        yield from self.jobs.values()
        for group in self.queue:
            yield from group

    def _give_up(self, error: Exception) -> None:
        for job in list(self.jobs.values()):
            if not job.finished:
                job.fail(error)
                self._ended(job, "failed")
        self.policy.reset()
        self.jobs.clear()
        self.reading.clear()
        self.batch.reset()
