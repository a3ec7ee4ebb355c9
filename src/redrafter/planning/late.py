"""Decides what recorded steps do, one step late: the beam and how many nodes are verified, or plain decoding.

On a GPU the host does not see a draft before its step ends. So it chooses the next step by what recent drafts promised,
and the device picks the likeliest nodes of all rows. A step of R rows gives R tokens and one more for each accepted
node; it takes the action that promises the most tokens in a second. No decision changes a text.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2

from redrafter.config import Shape
from redrafter.planning.calibration import Trust
from redrafter.planning.costs import ON_GPU, Costs
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Row, RowOutput

GRID = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes of a row for which a promise is kept."""
FIRST_PROMISE = 0.5
"""Accepted nodes per doubling of a row's verified tokens, before a draft said more."""
PROMISE_RATE = 0.1
"""How fast a known promise follows the drafts."""
WEIGHT, KEEPS = 4.0, 0.88
"""Of the trust in what recent drafts promise: how many accepted nodes the usual trust counts for, and the share of the
counts that is left after a step with a draft."""
USUAL_WEIGHT, USUAL_KEEPS = 2.0, 0.99
"""The same for the usual trust."""
PLAIN_KEEPS, TEXT_KEEPS, WRONG_KEEPS = 0.999, 0.3, 0.3
"""What is left of both after a plain step, where all rows begin new texts, and where the first draft after plain steps
was better than they say."""
TRIALS = 0.01
"""The share of plain decoding's time that drafts which do not seem to pay may lose: a drafter that is of use again is
found out."""
PER_TEXT, MOST_TRIALS = 1.0, 5.0
"""What they may lose for each new text beside that, as a share of the rows, and at most; in plain steps."""
MARGIN = 0.04
"""How much faster than plain decoding drafts must seem, so that steps draft again."""
RESUMING = 0.3
"""What the first draft after plain steps costs besides, in plain steps, until it was measured: the drafter catches up
while the device waits."""
CLEAR, COMPARE_EVERY = 1.5, 64
"""Where drafts are not faster by this factor, one of so many steps is plain, so that its price stays known."""
PATIENCE = 10.0
"""The first plain step must be recorded, which takes two seconds for a 7B model. It is taken when steps with a draft
seem to have lost so many plain steps."""
DOUBTFUL = 100.0
"""Seconds of drafts without a measured plain step, after which a plain step is taken to be twice as fast as it seems: a
recording is then cheap in comparison, so drafting must clearly pay to go on without one."""
LEARN_ALL, LEARN_EVERY = 64, 3
"""Prices are learned from the first steps and from one of so many later ones: the host has other work."""
RECORDING = 2.0
"""Seconds that a recording seems to cost: steps must lose so many by the nodes for which a pass was recorded, until
another one is, and a trial pays for its own."""

MOST_GUESSES, MOST_TOKENS, FEW_ROWS = 640, 128, 8
"""Guesses of all rows that a draft makes at most, tokens of a pass where each row has nodes of its own, and rows up to
which paths are as long as for one."""


@dataclass(frozen=True)
class Load:
    """What a step has to do. slots: of the KV cache that it reads."""

    rows: int  # that may guess
    others: int = 0  # that never do
    places: int = 1  # of the recorded step
    tokens: int = 1  # of its pass without drafted nodes, with padding
    slots: int = 0
    sampled: int = 0  # rows under noise


@dataclass(frozen=True)
class Action:
    """What a step may do. nodes: of all rows that are verified; tokens: of the pass, with padding."""

    shape: Shape | None
    nodes: int
    tokens: int


@dataclass
class Promise:
    """How many nodes of a row drafts of one beam promise to be accepted, by how many are verified.

    >>> promise = Promise()
    >>> promise(3), round(promise(63), 2)
    (1.0, 3.0)
    >>> promise.learn([1, 3], [0.8, 1.2])
    >>> promise(2), promise(3)
    (1.0, 1.2)
    """

    values: list[float] = field(default_factory=lambda: [FIRST_PROMISE * log2(1 + nodes) for nodes in GRID])
    seen: int = 0

    def __call__(self, nodes: float) -> float:
        return _between(nodes, GRID, self.values)

    def learn(self, nodes: Sequence[float], promised: Sequence[float]) -> None:
        """A draft promised so much with so many nodes of a row."""
        nodes, promised, self.seen = [0.0, *nodes], [0.0, *promised], self.seen + 1
        rate = max(PROMISE_RATE, 1 / self.seen)
        beyond = promised[-1] / max(self(nodes[-1]), 1e-9)  # what was not promised follows what was
        for i, at in enumerate(GRID):
            now = _between(at, nodes, promised) if at <= nodes[-1] else beyond * self.values[i]
            self.values[i] += rate * (now - self.values[i])


class LatePlanner:
    """Plans recorded steps. What it learns stays from text to text.

    shapes: the beams that may be drafted for this number of rows.
    """

    def __init__(self, shapes: Callable[[int], Sequence[Shape]], costs: Costs | None = None) -> None:
        self.shapes = shapes
        self.costs = costs or Costs(ON_GPU)
        self.usual, self.trust = Trust(USUAL_WEIGHT, USUAL_KEEPS), Trust(WEIGHT, KEEPS)
        self.promises: dict[Shape, Promise] = {}
        self.resuming = RESUMING  # in plain steps
        self.plain_seconds = 0.0  # of a plain step of the last load
        self.trials = 0.0  # seconds that drafts in vain may take
        self.lost = 0.0  # seconds that drafts seem to have lost while no plain step was recorded
        self.missed = 0.0  # seconds that other nodes than the recorded ones would have saved
        self.unmeasured = 0.0  # seconds of drafts until a plain step was measured
        self.since_plain = self.steps = 0
        self.drafting = True

    def begin(self, texts: float) -> None:
        """So many texts begin, as a share of the rows: the drafter may suit them better than the last ones."""
        most = max(self.trials, MOST_TRIALS * self.plain_seconds)  # a trial that costs more has been saved for
        self.trials = min(most, self.trials + PER_TEXT * texts * self.plain_seconds)
        self._forget(1 - min(1.0, texts) * (1 - TEXT_KEEPS))

    def choose(self, load: Load, drafts: Sequence[Action], ready: Callable[[Action], bool]) -> Action:
        """The next step. drafts: what may be drafted; ready: whether such a step was recorded."""
        plain = Action(None, 0, load.tokens)
        self.plain_seconds = self.seconds(plain, load) / (1 + min(1.0, self.unmeasured / DOUBTFUL))
        rates = {action: self.tokens(action, load) / self.seconds(action, load) for action in drafts}
        best = max(drafts, key=rates.__getitem__)
        recorded = [action for action in drafts if ready(action)]
        usable = max(recorded, key=rates.__getitem__) if recorded else best
        rate = (load.rows + load.others) / self.plain_seconds
        if rates[best] < rate * (1 if self.drafting else 1 + MARGIN):
            chosen = self._unless_plain(usable, plain, load, rate, ready)
        elif rates[best] < CLEAR * rate and self.since_plain >= COMPARE_EVERY and ready(plain):
            chosen = plain
        else:
            chosen = self._recorded(best, usable, load, rates)
        self.drafting = chosen.shape is not None
        self.since_plain = self.since_plain + 1 if self.drafting else 0
        return chosen

    def _unless_plain(
        self, draft: Action, plain: Action, load: Load, rate: float, ready: Callable[[Action], bool]
    ) -> Action:
        """Plain decoding seems faster: a plain step, unless the draft is tried or no plain step is worth recording."""
        loss = self.seconds(draft, load) - self.tokens(draft, load) / rate
        if not ready(plain) and ready(draft):
            self.lost = max(0.0, self.lost + loss)
            if self.lost < PATIENCE * self.plain_seconds:
                return draft
        if not self.drafting:
            loss += self.resuming * self.plain_seconds + (0.0 if ready(draft) else RECORDING)
            self.trials = min(MOST_TRIALS * self.plain_seconds + loss, self.trials + TRIALS * self.plain_seconds)
            if self.trials >= loss:
                self.trials -= loss
                return draft
        return plain

    def _recorded(self, best: Action, usable: Action, load: Load, rates: dict[Action, float]) -> Action:
        """The best draft, or one that is recorded until the other would have saved enough time."""
        self.missed += (1 - rates[usable] / rates[best]) * self.seconds(usable, load)
        if usable is not best and self.missed < RECORDING:
            return usable
        self.missed = 0.0
        return best

    def seconds(self, action: Action, load: Load) -> float:
        """What a step of this kind should take."""
        costs, shape = self.costs, action.shape
        seconds = costs.of_pass(action.tokens, load.slots, shape is not None)
        return seconds if shape is None else seconds + costs.of_draft(load.places, *_beam(shape), load.sampled)

    def tokens(self, action: Action, load: Load) -> float:
        """What it should give all rows."""
        plain = load.rows + load.others
        return plain if action.shape is None else plain + self.trust.ratio * self.promised(action, load)

    def promised(self, action: Action, load: Load) -> float:
        """Nodes of all rows that drafts say should be accepted, before this is corrected."""
        assert action.shape is not None
        return load.rows * self.promises.setdefault(action.shape, Promise())(action.nodes / max(1, load.rows))

    def learn(self, load: Load, action: Action, result: StepResult, budgets: Sequence[int], resumed: bool) -> None:
        """A step of this kind gave this result. budgets: those that it has promises for, if any."""
        rows = [(row, output) for row, output in result.rows if output.steps and row.drafts]
        if action.shape is not None and rows:
            self._learn_promises(load, action, rows, budgets, resumed)
        elif action.shape is None:
            self._forget(PLAIN_KEEPS)
        if result.parts and not result.read and all(output.steps for _, output in result.rows):
            self._learn_time(load, action, result, resumed)

    def _learn_promises(
        self,
        load: Load,
        action: Action,
        rows: Sequence[tuple[Row, RowOutput]],
        budgets: Sequence[int],
        resumed: bool,
    ) -> None:
        assert action.shape is not None
        promises = [output.promised for _, output in rows]
        known = len(budgets) > 0 and all(len(each) == len(budgets) for each in promises)
        if known:
            sums = [sum(column) for column in zip(*promises, strict=True)]
            promise = self.promises.setdefault(action.shape, Promise())
            promise.learn([n / len(rows) for n in budgets], [total / len(rows) for total in sums])
        usual, ratio = self.promised(action, load) / max(1, load.rows), self.trust.ratio
        expected = right = 0.0
        for row, output in rows:
            said = output.promised[min(bisect_left(budgets, action.nodes), len(budgets) - 1)] if known else usual
            output.expected = ratio * said
            if not output.done and row.processor is None:  # a grammar drops guesses and forces tokens
                expected, right = expected + said, right + output.drafted
        if resumed and right > ratio * expected:
            self._forget(WRONG_KEEPS)
        for trust in (self.usual, self.trust):
            trust.learn(expected / len(rows), right / len(rows))
        self.trust.first = self.usual.ratio

    def _learn_time(self, load: Load, action: Action, result: StepResult, resumed: bool) -> None:
        draft, rest = result.parts
        self.steps += 1
        learns = self.steps < LEARN_ALL or not self.steps % LEARN_EVERY or action.shape is None or resumed
        catches_up = resumed and not result.tokens  # the wall clock of an eager step does not tell it from the pass
        if learns and not catches_up:
            self.costs.learn_pass(rest, action.tokens, load.slots, action.shape is not None)
        if action.shape is None:
            self.unmeasured = self.lost = 0.0
            return
        if learns:
            self.costs.learn_draft(draft, load.places, *_beam(action.shape), load.sampled)
        self.unmeasured += draft + rest
        if resumed and self.plain_seconds and not catches_up:
            late = max(0.0, result.seconds - draft - rest) / self.plain_seconds
            self.resuming += 0.2 * (min(late, 3.0) - self.resuming)

    def _forget(self, keeps: float) -> None:
        """Evidence about drafts grows old."""
        for trust in (self.usual, self.trust):
            trust.right *= keeps
            trust.expected *= keeps
        self.trust.first = self.usual.ratio


def _beam(shape: Shape) -> tuple[int, int]:
    return shape.width, shape.length


def _between(at: float, known: Sequence[float], values: Sequence[float]) -> float:
    """Linear between the known places, constant beyond the last."""
    right = bisect_left(known, at)
    if right == len(known):
        return values[-1]
    if not right:
        return values[0]
    share = (at - known[right - 1]) / (known[right] - known[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def beams(shape: Shape, rows: int, count: int = 1) -> list[Shape]:
    """The beams for this many rows, the widest first: the given one for few rows, narrower ones for more.

    Their nodes are verified for each row where rows share no budget.

    >>> [beam.label for rows in (1, 8, 32) for beam in beams(Shape.of("16x5:63"), rows, 2)]
    ['16x5:63', '8x5:40', '16x5:15', '8x5:15', '4x4:3', '2x4:3']
    """
    width, length = shape.width, shape.length if rows <= FEW_ROWS else min(shape.length, 4)
    while width > 1 and rows * width * length > MOST_GUESSES:
        width //= 2
    nodes = max(1, MOST_TOKENS // rows - 1)
    widths = [width >> i for i in range(count) if width >> i]
    return [Shape(width=w, length=length, nodes=min(shape.budget, w * length, nodes)) for w in widths]
