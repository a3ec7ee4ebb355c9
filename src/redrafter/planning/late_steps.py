"""Steps of the running batch that are planned one step late."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from redrafter.config import Shape
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.runtime.batch import Batch
from redrafter.runtime.launched import StepResult
from redrafter.runtime.recorded_step import StepKind
from redrafter.runtime.row import Row


class LateSteps:
    """Recorded steps, planned one step late: the device never waits for the host."""

    def __init__(self, planner: LatePlanner) -> None:
        self.planner = planner
        self.fresh = 0  # rows that began since the last step
        self.postponed: tuple[Load, Action] | None = None  # chosen, and not launched before all results are known
        self.after_plain = False  # whether the last result was that of a plain step
        self.choices = Choices()

    def step(self, batch: Batch, rows: Sequence[Row], pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        """A step of all rows of the batch, planned for these. Results are those of the step before."""
        pieces = pieces or {}
        stepping = [row for row in rows if row.unread <= pieces.get(row, 0)]
        if not stepping:
            return self._learned(batch, batch.step(pieces=pieces))
        self.planner.begin(self.fresh / len(stepping))
        self.fresh = 0
        others = sum(not row.drafts for row in batch.stepping(pieces))
        load = load_of(batch, stepping, others)
        if self.postponed is not None and self.postponed[0].places == load.places:
            action = self.postponed[1]
        else:
            self.choices.look_at(batch, load.places)
            drafts = [a for shape in self.planner.shapes(load.places) for a in self.choices.actions(shape)]
            action = self.planner.choose(load, drafts, self.choices.ready)
        drafts_now = action.shape is not None and any(row.stepped for row in stepping)
        behind = drafts_now and any(not flight.launched.follows for flight in batch.flights)
        self.postponed = (load, action) if behind else None
        results = batch.drain() if behind else batch.step(action.shape, pieces=pieces, budget=action.nodes)
        return self._learned(batch, results)

    def _learned(self, batch: Batch, results: list[StepResult]) -> list[StepResult]:
        for result in results:
            rows = [row for row, _ in result.rows if row.drafts]
            load, shape = load_of(batch, rows, len(result.rows) - len(rows), result.size), result.shape
            self.choices.look_at(batch, batch.places(result.size))
            tokens = result.tokens or load.places * (1 if shape is None else shape.budget + 1)
            nodes = 0 if shape is None else load.places * shape.budget if result.budget is None else result.budget
            budgets = [] if shape is None else [action.nodes for action in self.choices.actions(shape)]
            if not result.tokens:  # an eager step: the wall clock
                draft = min(result.draft_seconds, result.seconds)
                result = replace(result, parts=(draft, result.seconds - draft))
            self.planner.learn(load, Action(shape, nodes, tokens), result, budgets, self.after_plain)
            if result.rows:  # else it only read prompts, or its rows were closed
                self.after_plain = shape is None and all(output.steps for _, output in result.rows)
        return results

    def open(self, row: Row) -> None:  # noqa: ARG002
        """A row begins: its prompt is read and its first token chosen."""
        self.fresh += 1

    def close(self, row: Row) -> None:
        """A row ends: nothing was kept of it."""

    def reset(self) -> None:
        """All rows ended."""
        self.postponed = None


def load_of(batch: Batch, rows: Sequence[Row], others: int, size: int = 0) -> Load:
    """Of a step of these rows and of so many that never draft; size: of rows that took part, if some have ended."""
    sampled = sum(row.request.sampling.temperature > 0 for row in rows)
    slots = sum(row.known for row in batch.live)
    places = batch.places(max(1, size, len(rows) + others))
    tokens = places if batch.steps is None else batch.steps.tokens(places)
    return Load(len(rows), others, places, tokens, slots, sampled)


class Choices:
    """What the planner may choose among: the steps of a batch with so many places.

    They are looked up again when its rows or recordings change.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.places = 0
        self.known: tuple[object, ...] = ()
        self.kinds: dict[Shape | None, StepKind | None] = {}
        self.drafts: dict[Shape, list[Action]] = {}

    def look_at(self, batch: Batch, places: int) -> None:
        """Answer for this batch and for so many places from now on."""
        known = (id(batch), places, batch.version, 0 if batch.steps is None else len(batch.steps.steps))
        if known != self.known:
            self.batch, self.places, self.known, self.kinds, self.drafts = batch, places, known, {}, {}

    def kind(self, shape: Shape | None) -> StepKind | None:
        """None: steps of this batch are not recorded."""
        assert self.batch is not None
        if self.batch.steps is None:
            return None
        if shape not in self.kinds:
            sampling = self.batch.sampling(self.places)
            self.kinds[shape] = self.batch.steps.kind(self.places, shape, shape is not None, sampling, planned=True)
        return self.kinds[shape]

    def actions(self, shape: Shape) -> list[Action]:
        """All that a step may do with this beam."""
        if shape not in self.drafts:
            kind, places = self.kind(shape), self.places
            steps = None if self.batch is None else self.batch.steps
            if kind is None or steps is None:
                self.drafts[shape] = [Action(shape, places * shape.budget, places * (shape.budget + 1))]
            else:
                self.drafts[shape] = [Action(shape, n, steps.tokens(places + n)) for n in steps.budgets(kind)]
        return self.drafts[shape]

    def ready(self, action: Action) -> bool:
        """Whether such a step needs no recording before it."""
        kind = self.kind(action.shape)
        assert self.batch is not None
        return kind is None or self.batch.steps is None or self.batch.steps.ready(kind, action.nodes)
