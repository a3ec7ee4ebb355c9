"""Whether the steps of an engine draft, by measured step times."""

import time
from collections.abc import Callable, Sequence

from redrafter.interop.load import Chooser


class MeasuredDepths:
    """Answers as a table from the number of requests to the number of guesses: all of them, or none."""

    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.widths, self.clock = [depth + 1, 1], clock
        self.chooser = Chooser(self.widths)

    def __getitem__(self, rows: int) -> int:
        """The guesses that each of so many requests gets after the step that begins now."""
        size = self.chooser.choose(rows)
        self.chooser.began(rows, size, self.clock())
        return self.widths[size] - 1

    def scheduled(self, counts: Sequence[int]) -> None:
        """The step that begins now computes so many tokens of each request."""
        if counts and max(counts) > self.widths[0]:  # a prompt
            self.chooser.interrupted()

    def accepted(self, drafted: int, accepted: int) -> None:
        """Of a request's guesses, so many were right."""
        if drafted:
            self.chooser.accepted(0, 1 + accepted)
