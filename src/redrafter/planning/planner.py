"""Decides what each step does: plain decoding, copied tokens alone, or a draft, and how far it goes.

A step of R rows gives R tokens and one more for each accepted node. What R tokens cost plainly is known, and so is how
much faster than that the steps were lately: `rate` tokens in a second. An action is worth the tokens that it promises
beyond those that could be written in its extra time, and the step takes the action that is worth the most. No decision
changes a text.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul

from redrafter.config import Shape
from redrafter.planning.calibration import MOST, POWER, Trust
from redrafter.planning.copying import MOST_COPIED, CopySource
from redrafter.planning.costs import Costs
from redrafter.planning.plan import Plan, Ranked, worth
from redrafter.runtime.copied import Copied
from redrafter.runtime.row import Row

FIRST_DRAFTS = ((0.85, 0.6, 0.4), (0.4, 0.15), (0.2,))
"""Probabilities of drafted nodes that a planner begins with, as if drafts had had them."""
ROW_DRAFTS, ALL_DRAFTS, ONE_OF = 8, 24, 4
"""Recent drafts of a row that tell what its next one is worth; and of all rows, where one of so many is kept."""
ALL_WEIGHT = 4.0
"""How many drafts of a row the drafts of all rows count for."""
FORGETS_EVERY = 12
"""A row that does not draft forgets one of its drafts in so many steps: what did not pay may pay now."""
TRIALS = 0.01
"""The share of plain decoding's time that drafts which do not seem to pay may lose: a drafter that is of use again is
found out."""
PER_TEXT = 0.2
"""What they may lose for each new text beside that, in plain steps."""
LEARN_ALL, LEARN_EVERY = 64, 3
"""Prices are learned from the first steps and from one of so many later ones: to learn takes time, too."""
MARGIN = 0.04
"""What a draft must promise beyond its price, in plain steps: expectations that just pay tend to be too high."""
RESTS = 6
"""Plain steps, at most, in which nothing is weighed where no draft is near to pay: to weigh takes time as well."""
COMPARE_EVERY = 64
"""After so many steps that were not plain, one is, so that the price of a plain step stays known."""
SPEED_RATE = 0.05
"""How fast the known speedup follows the steps."""
FURTHER = 0.55
"""How much likelier than its children the best path of a draft is thought to be, when the draft decides to go on."""
ROW_WEIGHT, ROW_KEEPS = 8.0, 0.97
"""Expected guesses that the trust of all texts counts for in a row's own, and the share of its count that a row keeps
from step to step."""
DRAFTER_WEIGHT, DRAFTER_KEEPS = 6.0, 0.995
"""The same for the trust of all texts."""


@dataclass
class RowRecord:
    """What the planner knows of one row."""

    sampled: bool
    source: CopySource | None  # None: nothing is copied
    trust: Trust  # in the drafter
    learns: bool  # whether the row tells anything about its drafter
    drafts: deque[list[float]] = field(default_factory=lambda: deque(maxlen=ROW_DRAFTS))
    made: int = 0  # drafts
    idle: int = 0  # steps without a draft


@dataclass
class Speed:
    """How much faster than plain decoding steps were lately, by what was expected of them."""

    tokens: float = 1.0  # of a step, relative to its rows
    seconds: float = 1.0  # of a step, relative to a plain one

    @property
    def speedup(self) -> float:
        return max(1.0, self.tokens / self.seconds)

    def learn(self, tokens: float, seconds: float) -> None:
        self.tokens += SPEED_RATE * (tokens - self.tokens)
        self.seconds += SPEED_RATE * (seconds - self.seconds)


class Planner:
    """Plans the steps of an engine or a server. What it learns stays from text to text.

    shape: the largest draft; None: nothing drafts. copies: whether rows copy from their texts.
    """

    def __init__(self, shape: Shape | None, *, copies: bool) -> None:
        self.shape, self.copies = shape, copies
        self.costs = Costs()
        self.trust = Trust(DRAFTER_WEIGHT, DRAFTER_KEEPS)
        self.copied = 1.0  # copied tokens that recent texts took, relative to the table of odds
        self.drafts = deque([list(draft) for draft in FIRST_DRAFTS], maxlen=ALL_DRAFTS)  # their nodes' probabilities
        self.levels = 2.0  # of recent drafts
        self.speeds: dict[int, Speed] = {}  # by rows
        self.trials = 0.0  # seconds that drafts in vain may take
        self.since_plain = 0
        self.steps = 0
        self.rests = 0  # steps that need no thought
        self.copying = True  # whether a copied token may pay
        self.rows: dict[Row, RowRecord] = {}

    def open(self, row: Row, text: Sequence[int], *, sampled: bool, copies: bool = True, learns: bool = True) -> None:
        """A row begins, with this text. learns: its guesses say something about the drafter."""
        source = CopySource(text, sampled=sampled, trust=self.copied) if self.copies and copies else None
        self.rests = 0
        self.rows[row] = RowRecord(sampled, source, Trust(ROW_WEIGHT, ROW_KEEPS), learns)
        if self.shape is not None and self.costs.known:
            self.trials += PER_TEXT * self.costs.of_pass(1)

    def close(self, row: Row) -> None:
        """A row ends. One that never began is ignored."""
        record = self.rows.pop(row, None)
        if record is not None and record.source is not None and record.learns:
            self.copied += 0.5 * (record.source.trust.ratio - self.copied)

    def choose(self, room: Mapping[Row, int], others: int = 0, slots: int = 0) -> Plan:
        """The next step of these rows, each with room for so many more tokens, and of `others` that never guess.

        slots: of the KV cache that the step reads.
        """
        count = len(room) + others
        if not self.costs.known or not room or self.since_plain >= COMPARE_EVERY:
            return Plan()
        copied = self._copied(room) if self.copying else {}
        if self.rests and not copied:
            self.rests -= 1
            return Plan()
        plain = self.costs.of_pass(count, slots)
        rate = self._speed(count).speedup * count / plain

        def price(nodes: int) -> float:
            return rate * self.costs.more(count, nodes)

        self.copying = price(1) < MOST
        copying = copy_alone(copied, price) if copied else Plan()
        if self.shape is None:
            return copying
        sampled = sum(self.rows[row].sampled for row in room)
        width = self.shape.width
        seconds = self.costs.of_draft(len(room), width, self.levels, sampled) + self.costs.after_draft
        gain = self._gain(room, copied, price(len(room)) / len(room))
        one, two = (self.costs.of_draft(len(room), width, levels, sampled) for levels in (1, 2))
        loss = seconds + MARGIN * plain - gain / rate
        if loss >= 0:
            if self.trials < loss:
                self.rests = int(min(RESTS, (loss - self.trials) / (plain * TRIALS)))
                return copying
            self.trials -= loss
        level = two - one
        least = (rate * level / len(room) + price(1)) / FURTHER
        return Plan(
            shape=_shortened(self.shape, least ** (1 / POWER), 1 + math.ceil(self.levels) if sampled else 0),
            copied=copied,
            price=price,
            trust={row: self._trust(row) for row in room},
            room={row: left - 1 for row, left in room.items()},
            most=max(self.shape.budget, MOST_COPIED if self.copies else 0),
        )

    def learn(
        self,
        plan: Plan,
        gained: Mapping[Row, Sequence[int]],
        seconds: tuple[float, float] | None,
        others: int = 0,
        slots: int = 0,
    ) -> None:
        """The step of this plan gave its rows these tokens.

        seconds: of the draft, and of the rest of the step; None if the step did more than its plan says.
        """
        count = len(gained) + others
        drafted = plan.shape is not None and plan.levels > 0
        if seconds is not None and gained:
            self._learn_time(plan, list(gained), seconds, count, slots, drafted)
        for row, tokens in gained.items():
            record = self.rows[row]
            if record.source is not None:
                record.source.take(tokens)
            if row in plan.drafted and record.learns:
                found = plan.drafted[row].decided(tokens)
                record.trust.learn(*found)
                self.trust.learn(*found)
            if row in plan.drafted and row not in plan.copied:
                record.drafts.append(plan.reached[row])
                record.made += 1
                if record.made % ONE_OF == 1:
                    self.drafts.append(plan.reached[row])
            else:
                record.idle += 1
                if record.drafts and record.idle % FORGETS_EVERY == 0:
                    record.drafts.popleft()

    def _learn_time(
        self,
        plan: Plan,
        rows: list[Row],
        seconds: tuple[float, float],
        count: int,
        slots: int,
        drafted: bool,
    ) -> None:
        costs, self.steps = self.costs, self.steps + 1
        learns = self.steps < LEARN_ALL or not self.steps % LEARN_EVERY
        if learns:
            costs.learn_pass(seconds[1], count + plan.nodes, slots, drafted)
        plain, step = costs.of_pass(count, slots), costs.of_pass(count + plan.nodes, slots, drafted)
        if drafted:
            assert plan.shape is not None
            about = (len(rows), plan.shape.width, plan.levels, sum(self.rows[row].sampled for row in rows))
            if learns:
                costs.learn_draft(seconds[0], *about)
            step += costs.of_draft(*about)
            self.levels += SPEED_RATE * (plan.levels - self.levels)
        expected = sum(plan.expected.values())
        self._speed(count).learn((count + expected) / count, step / plain)
        if drafted or plan.nodes:
            self.since_plain += 1
        else:
            self.since_plain = 0
            self.trials += TRIALS * plain

    def _trust(self, row: Row) -> float:
        """In the drafter, where it guesses for this row."""
        trust = self.rows[row].trust
        trust.first = self.trust.ratio
        return trust.ratio

    def _gain(self, rows: Iterable[Row], copied: Mapping[Row, Copied], node: float) -> float:
        """What a draft of these rows adds to what was copied, in tokens beyond the price of its nodes.

        node: the price of each. Where a copied token is right, the draft adds nothing.
        """

        def worth_of(drafts: Iterable[list[float]]) -> float:
            return sum(p - node for draft in drafts for p in draft if p > node)

        usual = worth_of(self.drafts) / len(self.drafts)
        total = 0.0
        for row in rows:
            own = self.rows[row].drafts
            needed = 1 - copied[row].odds[0] if row in copied else 1.0
            total += needed * (worth_of(own) + ALL_WEIGHT * usual) / (len(own) + ALL_WEIGHT)
        return total

    def _speed(self, count: int) -> Speed:
        """For this number of rows; at first that of the nearest one."""
        if count not in self.speeds:
            near = min(self.speeds, key=lambda n: abs(n - count), default=None)
            self.speeds[count] = Speed() if near is None else replace(self.speeds[near])
        return self.speeds[count]

    def _copied(self, room: Mapping[Row, int]) -> dict[Row, Copied]:
        found = {row: s.look_up(left - 1) for row, left in room.items() if (s := self.rows[row].source) is not None}
        return {row: copied for row, copied in found.items() if copied.tokens}


def copy_alone(copied: Mapping[Row, Copied], price: Callable[[int], float]) -> Plan:
    """A step that verifies copied tokens and nothing else, as many as pay.

    >>> copy_alone({"a": Copied([5, 6, 7], [0.9, 0.8, 0.1])}, lambda nodes: 0.2 * nodes).copied
    {'a': Copied(tokens=[5, 6], odds=())}
    """
    rows = list(copied)
    ranked: list[Ranked] = [
        (-p, place, depth)
        for place, row in enumerate(rows)
        for depth, p in enumerate(accumulate(copied[row].odds, mul), 1)
    ]
    chosen = worth(ranked, price, MOST_COPIED)
    lengths = Counter(place for _, place, _ in chosen)
    return Plan(
        copied={rows[place]: Copied(copied[rows[place]].tokens[:n]) for place, n in lengths.items()},
        price=price,
        expected={rows[place]: -sum(p for p, of, _ in chosen if of == place) for place in lengths},
        nodes=len(chosen),
    )


def _shortened(shape: Shape, least: float, levels: int) -> Shape:
    """The shape of a draft that ends where its paths are less probable than this, or after so many levels, if not 0.

    Noise is made for all levels before the draft. Few different shapes: each is checked, and has a rule of its own.
    """
    return _shape(shape, min(0.95, round(least, 2)), min(levels or shape.length, shape.length))


@lru_cache(maxsize=512)
def _shape(shape: Shape, until: float, length: int) -> Shape:
    return replace(shape, until=until, length=length)
