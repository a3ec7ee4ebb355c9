"""Whether the next step of `generate` on a GPU drafts or decodes plainly. No decision changes a text.

An account holds the time that drafts have gained over plain decoding, counted in plain steps. A step with a draft adds
the tokens that it gave a row and subtracts its cost. A plain step adds a small share. Steps draft while the account is
above zero. So the time lost to drafts that fail is limited: to what the account began with, and to that share.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redrafter.config import Shape
from redrafter.runtime.batch import Batch
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Row

CREDIT = 5.0
"""What the account begins with, and the most that it holds: a drafter that was good may then fail for as long."""
SHARE = 0.01
"""What a plain step adds. The steps that try the drafter again may cost this share of the time."""
TRIAL = 1.0
"""What a new text adds, divided by the number of rows: the drafter may suit this text better than the last one."""
ASSUMED, PER_TOKEN = 1.6, 1 / 300
"""Assumed cost of a step with a draft, and of each token that the step verifies, while no plain step was measured. A 7B
model on an H200 costs less (benchmarks/results/serve_gpu.json). A cost that is assumed too high leads to a recording
that was not needed, one that is assumed too low to drafts that lose time unnoticed."""
DOUBTFUL = 100.0
"""After drafting for so many seconds without a measured plain step, twice the assumed cost is assumed. A recording is
then cheap in comparison, so drafting must clearly pay to go on without one."""
RECENT, ENOUGH = 15, 3
"""Steps of a kind that are remembered, and how many of them are a measurement."""

StepKind = Literal["plain", "drafted", "resumed"]
"""`resumed`: the first step with a draft after plain steps. The drafter catches up before it, while the GPU waits."""


class Size(NamedTuple):
    """Steps of equal size cost the same."""

    rows: int  # of the batch
    places: int  # rows that are computed in a step
    context: int  # bits of the tokens that a row has room for: about as much room, the same costs
    sampled: bool


class StepTimes:
    """Seconds of recent steps of one size. The median counts: prompts that are read in between and readers of a stream
    that take their time make some steps long."""

    def __init__(self) -> None:
        self.recent: dict[StepKind, deque[float]] = {
            kind: deque(maxlen=RECENT) for kind in ("plain", "drafted", "resumed")
        }
        self.unmeasured = 0.0  # seconds of steps with a draft until plain steps were measured

    @property
    def measured(self) -> bool:
        return all(len(self.recent[kind]) >= ENOUGH for kind in ("plain", "drafted"))

    def add(self, kind: StepKind, seconds: float) -> None:
        self.recent[kind].append(seconds)
        if not self.measured:
            self.unmeasured += seconds

    def cost(self, kind: StepKind) -> float:
        """In plain steps."""
        found = self.recent[kind] or self.recent["drafted"]
        return statistics.median(found) / statistics.median(self.recent["plain"])


class DraftAccount:
    """The account of one engine, whose drafts have this shape. It is kept from text to text.

    Only plain steps tell what plain steps cost, and the first plain step of a size has to be recorded: 2 seconds for a
    7B model. So the first plain step is taken only when the account, by the assumed cost, is `CREDIT` below zero.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.balance = CREDIT
        self.times: dict[Size, StepTimes] = {}
        self.scale = 1.0  # of the measured cost to the assumed one

    def pays(self, size: Size) -> bool:
        """Whether the next step should draft."""
        times = self._times(size)
        if times.measured:
            return self.balance > 0
        if times.recent["plain"]:  # once recorded, plain steps go on until measured, then steps with a draft
            return len(times.recent["plain"]) >= ENOUGH
        return self.balance > -CREDIT

    def cost(self, size: Size, kind: StepKind = "drafted") -> float:
        """Of a step with a draft, in plain steps."""
        times = self._times(size)
        if times.measured:
            return times.cost(kind)
        return self.scale * self._assumed(size) * (1 + min(1.0, times.unmeasured / DOUBTFUL))

    def begin(self, texts: float) -> None:
        """So many texts begin, as a share of the rows."""
        self.balance = min(CREDIT, self.balance + TRIAL * texts)

    def learn(self, size: Size, kind: StepKind, tokens: float, seconds: float | None) -> None:
        """A step gave each row so many tokens. `seconds` is None if the step's time is not its own."""
        times = self._times(size)
        before = times.measured
        if seconds is not None:
            times.add(kind, seconds)
        gained = SHARE if kind == "plain" else tokens - self.cost(size, kind)
        # A try launches two steps before its first result is known. The account may fall as far as they cost.
        least = -2 * self.cost(size) if times.measured else -CREDIT
        self.balance = max(least, min(CREDIT, self.balance + gained))
        if times.measured and not before:  # the balance was made of assumed costs
            self.scale = times.cost("drafted") / self._assumed(size)
            self.balance = max(self.balance, TRIAL)

    def _times(self, size: Size) -> StepTimes:
        return self.times.setdefault(size, StepTimes())

    def _assumed(self, size: Size) -> float:
        return ASSUMED + PER_TOKEN * size.places * (self.shape.budget + 1)


class AccountPolicy:
    """Decides for one run, by the engine's account: all rows draft in the next step, or none does."""

    def __init__(self, account: DraftAccount) -> None:
        self.account = account
        self.asked: Shape | None = account.shape  # of the step launched last
        self.told: Shape | None = account.shape  # of the step whose result came last
        self.fresh = 0  # rows that began since then

    def step(self, batch: Batch, rows: Sequence[Row], pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        """A step of all rows, chosen and learned from. The result of a recorded step comes with the next call."""
        self.account.begin(self.fresh / len(rows))
        shape = self.choose(size_of(batch, rows, len(rows)))
        # A prompt that was read, or a step that was recorded, made the step under way seem long.
        alone = shape == self.asked and not self.fresh
        self.asked, self.fresh = shape, 0
        results = batch.step(shape, pieces=pieces)
        for result in results:
            tokens = [len(output.tokens) for _, output in result.rows if output.steps]
            if tokens:  # else all rows ended before, or have just begun
                kind: StepKind = "plain" if result.shape is None else "resumed" if self.told is None else "drafted"
                size = size_of(batch, rows, result.size)
                self.account.learn(
                    size, kind, sum(tokens) / len(tokens), result.seconds if alone and not result.read else None
                )
            self.told = result.shape
        return results

    def choose(self, size: Size) -> Shape | None:
        return self.account.shape if self.account.pays(size) else None

    def open(self, row: Row) -> None:  # noqa: ARG002
        """A row begins: its prompt is read and its first token chosen."""
        self.fresh += 1

    def close(self, row: Row) -> None:
        """A row ends: nothing was kept of it."""


def size_of(batch: Batch, rows: Sequence[Row], stepping: int) -> Size:
    """Of a step in which so many of these rows take part."""
    sampled = any(row.request.sampling.temperature > 0 for row in rows)
    return Size(batch.rows, batch.places(stepping), batch.context.bit_length(), sampled)
