"""A launched step of the running batch, and what it gave its rows."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from redrafter.config import Shape
from redrafter.runtime.result_line import ResultLine
from redrafter.runtime.row import Row, RowOutput, logprobs_of

Results = list[list[list[int]]]
"""By step, by row: a line of `result_line`."""


@dataclass(frozen=True)
class Launched:
    """One or more steps that were launched; `results` waits for the end of them."""

    results: Callable[[], Results]
    width: int  # of the new tokens in a line of the results
    follows: bool  # the drafter has taken in the new tokens
    logits: Tensor | None = None  # (B, N+1, V), kept where a row wants log-probabilities
    late: bool = False  # the results may be read after the next launch
    recording: float = 0.0  # seconds that the launch took to record first
    draft_seconds: float = 0.0  # of this thread in the draft; of eager steps only
    tokens: int = 0  # of the pass, with padding; of recorded steps only
    budget: int | None = None  # drafted nodes of all rows together; None: each row has the shape's
    promised: int = 0  # budgets that lines tell the promises of
    parts: Callable[[], list[float]] = list  # seconds of the draft and of the rest; of recorded steps only

    def output(self, results: Results, place: int, row: Row) -> RowOutput:
        """What the steps gave the row that stood at this place."""
        output = RowOutput([], error=row.error)
        for lines in results:  # thousands of rows in bulk writing: no work here but for what is needed
            line = ResultLine(lines[place], self.width, self.promised)
            output.tokens += line.tokens
            output.drafted += min(line.count, line.drafted)
            output.nodes += line.nodes
            output.steps += 1
            if line.done:
                output.done = True
                break
        output.tree = line.tree  # of the last step
        output.promised = line.promised
        if row.logprobs is not None and self.logits is not None:
            output.logprobs = logprobs_of(self.logits[place][list(line.path)], list(line.tokens), row.logprobs)
        return output


@dataclass(frozen=True)
class StepResult:
    """What one launch gave its rows, those left out that were closed in the meantime."""

    shape: Shape | None
    rows: list[tuple[Row, RowOutput]]
    size: int  # rows that took part
    seconds: float  # from the end of the step before, or from the launch if nothing was running; no recording
    read: int = 0  # prompt tokens that were read in the same passes
    draft_seconds: float = 0.0  # of this thread in the draft; of eager steps only
    tokens: int = 0  # of the pass, with padding; of recorded steps only
    budget: int | None = None  # drafted nodes of all rows together; None: each row has the shape's
    parts: tuple[float, ...] = ()  # seconds of the draft and of the rest; of recorded steps only

    @property
    def label(self) -> str | None:
        """The shape with the nodes of a row; None: nothing was drafted."""
        if self.shape is None or self.budget is None:
            return None if self.shape is None else self.shape.label
        return f"{self.shape.width}x{self.shape.length}:{round(self.budget / max(1, self.size))}"


@dataclass(frozen=True)
class Flight:
    """A launched step and its rows, each with its place at the launch."""

    launched: Launched
    shape: Shape | None
    rows: list[tuple[Row, int]]
    count: int
    began: float
    read: int = 0
    first: set[Row] = field(default_factory=set)  # rows whose first token comes with this step
    begun: set[Row] = field(default_factory=set)  # rows whose texts the drafter knows after this step

    def result(self, rows: list[tuple[Row, RowOutput]], seconds: float) -> StepResult:
        """What the step gave these rows, those that are still open."""
        launched = self.launched
        return StepResult(
            self.shape,
            rows,
            len(self.rows),
            seconds,
            self.read,
            launched.draft_seconds,
            launched.tokens,
            launched.budget,
            tuple(launched.parts()),
        )
