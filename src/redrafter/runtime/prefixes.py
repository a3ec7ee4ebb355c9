"""Prompts that begin like another row's copy that part instead of reading it: which part, and from where.

Keys and values of a prefix can be copied from any row that has it. A recurrent state cannot be cut: it is that of the
whole text so far. So states are copied aside while prompts are read, at multiples of `EVERY` tokens, and a prompt goes
on from the last copy inside the common prefix. What comes behind it is read again, written text too: a prompt is
read in other products than a text is written.
"""

from collections.abc import Sequence

from redrafter.core.recurrence import RecurrentMemory
from redrafter.runtime.row import Row, best_source
from redrafter.runtime.state import BatchState

EVERY = 64
"""A piece of a prompt ends at a multiple of this where it can, and there a copy may be taken."""
FAR = 512
"""A row keeps its newest copy, and those at multiples of this."""
FOR_EACH_PLACE = 2
"""Copies that there is room for, for each place of the batch."""


class Prefixes:
    """The copies of states of a batch's rows; the one that was longest unused goes first."""

    def __init__(self, state: BatchState) -> None:
        self.state = state
        self.state_bytes = state.cache.recurrent.nbytes // state.places  # of one row
        self.recurrent = self.state_bytes > 0
        self.most = FOR_EACH_PLACE * state.places
        self.copies: dict[tuple[Row, int], RecurrentMemory] = {}  # by row and length, the last used one last

    def source(self, rows: Sequence[Row | None], row: Row) -> tuple[Row | None, int]:
        """The row that this one can copy most from, and how many tokens."""
        return best_source(rows, row, self._longest if self.recurrent else None)

    def copy(self, source: Row, row: Row, length: int) -> None:
        """Let a row begin with this many tokens of another."""
        self.state.copy(source.place, row.place, row.known, length)
        if self.recurrent:
            memory = self.copies[source, length] = self.copies.pop((source, length))
            self.state.put_recurrent(row.place, memory)

    def piece_size(self, known: int, count: int) -> int:
        """How many of `count` tokens behind `known` to read at once."""
        end = (known + count) // EVERY * EVERY
        return end - known if self.recurrent and end > known else count

    def after_piece(self, row: Row) -> None:
        """Copy the state of a row whose prompt is being read, where it is worth it."""
        if not self.recurrent or not row.known or row.known % EVERY:
            return
        for key in [key for key in self.copies if key[0] is row and key[1] % FAR]:
            del self.copies[key]
        self.copies[row, row.known] = self.state.cache.recurrent.snapshot(row.place)
        while len(self.copies) > self.most:
            del self.copies[next(iter(self.copies))]

    def forget(self, row: Row | None) -> None:
        """A row whose place is taken has no keys and values any more."""
        for key in [key for key in self.copies if key[0] is row]:
            del self.copies[key]

    @property
    def nbytes(self) -> int:
        return len(self.copies) * self.state_bytes

    def _longest(self, row: Row, shared: int) -> int:
        """How much of a row's first `shared` tokens has a copy."""
        return max((length for other, length in self.copies if other is row and length <= shared), default=0)
