"""How many nodes to verify in a step: the size of tree that writes most tokens per second at this load.

Every node costs time once the GPU computes as long as it reads weights, and the more requests run, the sooner. Step
times are measured while serving, per batch size and size of tree. What was not measured yet is predicted from what was,
so at a new load only the sizes next to the best one are tried.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from redrafter.config import Shape, require

log = logging.getLogger(__name__)

TRIED = 8
"""Measured steps after which a time is known."""
KEPT = 15
"""Step times that a median is taken over."""
AGAIN = 250
"""Steps after which a size of tree next to the best one is tried, since costs and texts change."""
REMEMBERED = 50
"""Steps that the mean of accepted tokens is taken over, about."""
TRIAL = 40
"""Most steps of a size's first trial. Prompts that interrupt every few steps may keep its time from being known."""
SETTLED = 2
"""Steps of one kind in a row before the time between two is that kind's: an overlapped engine reports one late."""
DOUBLES = 240
"""Tokens in a pass that take twice the time of one token, until times are measured: a 7B model on an H200."""


SHAPES = ("2x2:3", "4x3:7", "8x4:15", "8x5:31", "16x5:63")
"""Beams for trees of 4, 8, 16, 32 and 64 nodes, as redrafter's own server chooses among them."""


def shape_of(width: int) -> Shape | None:
    """The shape of a tree with `width` nodes, its root included. None: the root alone.

    >>> [s and s.label for s in map(shape_of, (100, 64, 12, 1))]
    ['16x7:99', '16x5:63', '8x4:11', None]
    """
    require(width >= 1, f"a tree has at least one node, got {width}")
    nodes = width - 1
    if nodes == 0:
        return None
    for shape in map(Shape.of, SHAPES):
        if nodes <= shape.budget:
            return replace(shape, nodes=nodes)
    return Shape(width=16, length=-(-nodes // 16), nodes=nodes)


def ladder(width: int) -> list[int]:
    """The sizes of tree to choose from: halves of the largest down to 4, then the root alone.

    >>> ladder(32)
    [32, 16, 8, 4, 1]
    """
    sizes = [width]
    while sizes[-1] >= 8:
        sizes.append(sizes[-1] // 2)
    return [*sizes, 1] if sizes[-1] > 1 else sizes


def bucket(rows: int) -> int:
    """Batch sizes that are judged together: the next power of two.

    >>> [bucket(n) for n in (1, 3, 8, 9)]
    [1, 4, 8, 16]
    """
    return 1 << (rows - 1).bit_length()


class Chooser:
    """Chooses among trees of `widths` nodes, the largest first, by measured step times and accepted tokens."""

    def __init__(self, widths: Sequence[int], most_tokens: int = 1024) -> None:
        require(len(widths) > 0, "give at least one size of tree")
        self.widths, self.most_tokens = list(widths), most_tokens
        self.times: dict[tuple[int, int], deque[float]] = {}  # (bucket, size) -> seconds of recent steps
        self.trials: Counter[tuple[int, int]] = Counter()  # (bucket, size) -> steps of its first trial
        self.guessed = [0.0] * len(widths)  # mean accepted guesses of a request's step
        self.counted = [0] * len(widths)  # steps in that mean
        self.most_rows: list[int | None] = [None] * len(widths)  # None: no limit
        self.steps = 0
        self._last: tuple[int, int] | None = None
        self._same = 0
        self._since = 0.0

    def usable(self, rows: int) -> list[int]:
        """Sizes whose pass over this many requests is not too large; always the smallest."""
        found = [i for i, w in enumerate(self.widths) if bucket(rows) * w <= self.most_tokens]
        found = [i for i in found if (most := self.most_rows[i]) is None or rows <= most]
        return found or [len(self.widths) - 1]

    def choose(self, rows: int) -> int:
        """The size of tree for the next step, as an index into `widths`."""
        self.steps += 1
        at, usable = bucket(rows), self.usable(rows)
        best = max(usable, key=lambda size: self.tokens(size) / self.seconds(at, size))
        here = usable.index(best)
        if self._known(at, best):  # predictions may be wrong: compare with the next smaller and the next larger tree
            for size in usable[here + 1 : here + 2] + usable[max(0, here - 1) : here]:
                if not self._known(at, size) and self.trials[at, size] < TRIAL:
                    self.trials[at, size] += 1
                    return size
        if self.steps % AGAIN >= AGAIN - SETTLED - TRIED:
            other = here + (1 if self.steps // AGAIN % 2 else -1)
            return usable[other] if 0 <= other < len(usable) else best
        return best

    def tokens(self, size: int) -> float:
        """New tokens of a request's step. Twice the nodes find about one step more of a path."""

        def found(i: int) -> float:
            return math.log2(self.widths[i])

        if self.counted[size] >= TRIED or not found(size):
            return 1 + self.guessed[size]
        known = sum(self.counted[i] * found(i) for i in range(len(self.widths)))
        accepted = sum(n * mean for n, mean in zip(self.counted, self.guessed, strict=True))
        return 1 + found(size) * (accepted / known if known else 0.5)

    def seconds(self, at: int, size: int) -> float:
        """The time of a step: measured, or predicted from the measured pass of the nearest number of tokens."""
        if self._known(at, size):
            return median(self.times[at, size])
        known = {kind: median(t) for kind, t in self.times.items() if len(t) >= TRIED}
        if not known:
            return self._relative(at, size)
        near = min(known, key=lambda kind: abs(math.log2(self._relative(*kind) / self._relative(at, size))))
        return known[near] * self._relative(at, size) / self._relative(*near)

    def _known(self, at: int, size: int) -> bool:
        return len(self.times.get((at, size), ())) >= TRIED

    def _relative(self, at: int, size: int) -> float:
        return 1 + at * self.widths[size] / DOUBLES

    def began(self, rows: int, size: int, now: float) -> None:
        """A step of this kind begins; the time since the previous step is that step's, if both are of one kind.

        For engines of which only the moment is known when the host begins a step. If steps are timed, call `took`.
        """
        kind = (bucket(rows), size)
        self._same = self._same + 1 if kind == self._last else 0
        if self._same >= SETTLED:
            self.took(rows, size, now - self._since)
        self._last, self._since = kind, now

    def took(self, rows: int, size: int, seconds: float) -> None:
        """A step of this kind has taken so long."""
        times = self.times.setdefault((bucket(rows), size), deque(maxlen=KEPT))
        times.append(seconds)
        if len(times) == TRIED:
            width, taken = self.widths[size], 1000 * median(times)
            log.info(
                "redrafter: a step of %d requests with trees of %d nodes takes %.2f ms", bucket(rows), width, taken
            )

    def interrupted(self) -> None:
        """Something other than a step ran: the next time between two steps says nothing."""
        self._last, self._same = None, 0

    def accepted(self, size: int, tokens_per_request: float) -> None:
        """A step with this size of tree gave so many new tokens per request."""
        self.counted[size] = min(REMEMBERED, self.counted[size] + 1)
        self.guessed[size] += (tokens_per_request - 1 - self.guessed[size]) / self.counted[size]
