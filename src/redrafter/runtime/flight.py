"""A launched step of the running batch, and what it gave its rows."""

from dataclasses import dataclass
from typing import NamedTuple

from redrafter.config import Shape
from redrafter.runtime.executor import Launched
from redrafter.runtime.row import Row, RowOutput


class Kind(NamedTuple):
    """Rows that step together."""

    drafts: bool
    watched: bool | None = None  # only rows that are, or are not, `Row.watched`; None: all


@dataclass(frozen=True)
class StepResult:
    """What one launch gave its rows, those left out that were closed in the meantime."""

    kind: Kind
    shape: Shape | None
    rows: list[tuple[Row, RowOutput]]
    size: int  # rows that took part
    seconds: float  # from the end of the step before, or from the launch if nothing was running; no recording


@dataclass(frozen=True)
class Flight:
    """A launched step and its rows, each with its line in the results."""

    launched: Launched
    kind: Kind
    shape: Shape | None
    rows: list[tuple[Row, int]]
    count: int
    began: float
