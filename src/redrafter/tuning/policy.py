"""What the next step does on a CPU, in `generate` and in the server: each verified node and each draft has its price.

A step decodes plainly, verifies tokens copied from the text (`drafters.ngram_index`), or lets the drafter guess. The
policy takes what promises the most tokens for its time. It knows the odds of a copied chain, how many drafted tokens a
row accepted lately, and what steps cost relative to a plain step. No decision changes a text.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters.ngram import NgramDrafter
from redrafter.drafters.ngram_index import NgramIndex
from redrafter.drafters.with_ngrams import FORGETS, LONGEST, ODDS, SHORTEST, TELLING, WithNgrams
from redrafter.runtime.batch import Batch
from redrafter.runtime.copied import Copied
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Row
from redrafter.tuning.acceptance import Acceptance
from redrafter.tuning.profile import MIN_SPEEDUP

MOST_COPIED = 10
"""Tokens of a copied chain that are verified at once."""
TABLE_WEIGHT = 3.0
"""How many right tokens of a row count as much as the table of odds."""
MOST_ROWS = 8
"""More rows decode plainly: a pass over so many tokens costs about as much again for each further token."""
MOST_CERTAIN = 0.97
"""No copied token is thought to be more certain."""
MOST_NODE = 0.7
"""Where a node costs more of a plain step than this, nothing is copied. On two cores nodes cost 0.73 with 4 requests
and 0.80 with 8; copied tokens that seemed to pay then made the server 2 and 3 % slower than plain decoding."""
RECOVERY = 0.005
"""As `chooser.RECOVERY`, and faster: costs that are learned while others use the machine may be wrong."""
LEAST_NODE = 0.01
EXPECTED = 0.8
"""Accepted tokens of a drafted step that a drafter is tried with."""
COMPARE_EVERY = 24
"""After this many steps a plain step is taken, to know what the others cost in comparison."""
LEARNING_RATE, SURPRISE = 0.2, 1.3
"""How fast costs follow the clock, and how far from the known cost a measured one counts: on a machine with other
programs, some steps take many times as long."""
FIRST, FIRST_SURPRISE = 4, 3.0
"""The first few steps of a kind count for more, since another machine or model may have quite other costs."""


class StepCosts:
    """The cost of steps relative to a plain step, learned while they run.

    node: what one more verified node of every row adds. drafted: a step with a draft, whatever it verifies. Both begin
    with what SmolLM2-135M in 4 bits costs on two AVX-512 cores (benchmarks/results/cpu.json).
    """

    def __init__(self, node: float = 0.17, drafted: float = 1.7) -> None:
        self.node, self.drafted = node, drafted
        self.first = (node, drafted)
        self.confirmed = (node, drafted)  # at their last steps; since then they have moved towards the first costs
        self.plain = 0.0  # seconds of recent plain steps; 0: none yet
        self.since_plain = 0  # steps
        self.seen = {"plain": 0, "drafted": 0, "chain": 0}  # steps that were learned from

    @property
    def learned(self) -> bool:
        """Whether a step with a draft or with copied tokens was measured."""
        return self.seen["drafted"] + self.seen["chain"] > 0

    def begin_with(self, other: "StepCosts") -> None:
        self.node, self.drafted = self.first = self.confirmed = other.first

    def of_chain(self, nodes: float) -> float:
        return 1 + self.node * nodes

    def of_rows(self, times: float) -> "StepCosts":
        """What to expect with this many times as many rows: a token costs the same, in a row of its own or as a node.

        >>> two = StepCosts(node=0.25, drafted=1.75).of_rows(2)
        >>> two.node, two.drafted
        (0.4, 2.2)
        """
        node, drafted = self.confirmed
        plain = 1 + node * (times - 1)
        return StepCosts(node * times / plain, 1 + (drafted - 1) * times / plain)

    @property
    def of_draft(self) -> float:
        """What a step with a draft is thought to cost. Its first steps are cold: they alone do not end drafting."""
        return min(self.drafted, self.first[1]) if self.seen["drafted"] < FIRST else self.drafted

    @property
    def stale(self) -> bool:
        """Whether it is time for a plain step."""
        return not self.plain or self.since_plain >= COMPARE_EVERY

    def learn(self, drafted: bool, nodes: float, seconds: float) -> None:
        """A step that verified `nodes` nodes a row beside the last token took this long.

        Costs that the step tells nothing about return slowly to their first values, so that what once seemed slow is
        tried again. If it is still slow, they are at once what they were.
        """
        if drafted or not nodes:
            self.node *= (self.first[0] / self.node) ** RECOVERY
        if not drafted:
            self.drafted *= (self.first[1] / self.drafted) ** RECOVERY
        if not drafted and not nodes:
            self.plain = self._moved("plain", self.plain or seconds, seconds)
            self.since_plain = 0
            return
        self.since_plain += 1
        if not self.plain:
            return
        cost = seconds / self.plain
        if drafted:
            before = self.drafted if cost < self.drafted else max(self.drafted, self.confirmed[1])
            self.drafted = self._moved("drafted", before, cost)
        else:
            before = self.of_chain(nodes)
            if cost > before:
                before = max(before, 1 + self.confirmed[0] * nodes)
            self.node = max(LEAST_NODE, (self._moved("chain", before, cost, min(1.0, nodes)) - 1) / nodes)
        self.confirmed = (self.confirmed[0], self.drafted) if drafted else (self.node, self.confirmed[1])

    def _moved(self, kind: str, known: float, seen: float, weight: float = 1.0) -> float:
        """The known cost, moved towards the one that was seen, in logarithms: twice and half as slow cancel out.

        weight: less for a step that tells little.
        """
        times = self.seen[kind] = self.seen[kind] + 1
        most = SURPRISE if times > FIRST else FIRST_SURPRISE
        factor = min(max(seen / known, 1 / most), most)
        return float(known * factor ** (weight * max(LEARNING_RATE, 1 / (1 + times))))


@dataclass
class RowRecord:
    """What the policy knows of one row."""

    accepted: Acceptance  # drafted tokens of a step
    copied: float  # right copied tokens of the texts before, relative to the table of odds
    sampled: bool
    index: NgramIndex | None  # None: nothing is copied
    new: list[int] = field(default_factory=list)  # tokens that the index lacks
    chain: list[int] = field(default_factory=list)  # what followed the text's end before
    match: int = 0  # tokens of the match
    right: float = 0.0  # copied tokens that the text took lately
    expected: float = 0.0  # how many of them the table of odds expected

    def look_up(self) -> None:
        if self.index is not None:
            self.index.extend(self.new)
            self.new = []
            self.chain, self.match = self.index.chain(MOST_COPIED)

    def table(self) -> list[float]:
        """The probability of each token of the chain if all before are right, whatever the row copied before."""
        first, second, later = ODDS["sampled" if self.sampled else "greedy"][self.match - SHORTEST]
        return [first, second] + [later] * (len(self.chain) - 2)

    @property
    def ratio(self) -> float:
        """Right copied tokens, of this text and those before, relative to the table."""
        return (TABLE_WEIGHT * self.copied + self.right) / (TABLE_WEIGHT + self.expected)

    def odds(self) -> list[float]:
        """The table, corrected by how many copied tokens were right."""
        if not self.match:
            return []
        ratio = self.ratio
        return [min(MOST_CERTAIN, ratio * odds) for odds in self.table()]

    def take(self, tokens: Sequence[int]) -> None:
        """New tokens of the text: count the copied tokens that they decided."""
        if self.match and tokens:
            right = 0
            while right < min(len(tokens), len(self.chain)) and tokens[right] == self.chain[right]:
                right += 1
            decided = min(right + 1, len(tokens), len(self.chain))
            self.right = FORGETS * self.right + right
            self.expected = FORGETS * self.expected + sum(self.table()[:decided])
        self.match = 0  # the chain was about the text's end before these tokens
        self.new += tokens


@dataclass(frozen=True)
class Plan:
    """One step: a draft of this shape, mixed with the copied tokens; without a shape, the copied tokens alone."""

    shape: Shape | None
    copied: Mapping[Row, Copied] = field(default_factory=dict)  # empty: nothing


@dataclass
class Experience:
    """What an engine or a server keeps from text to text."""

    costs: dict[tuple[int, bool], StepCosts] = field(default_factory=dict)  # by rows, and whether one of them samples
    accepted: float = 1.0  # drafted tokens of a step that recent texts took, relative to EXPECTED
    copied: float = 1.0  # copied tokens that recent texts took, relative to the table of odds


class StepPolicy:
    """Decides for the rows of one run.

    shape: of a draft; None if nothing but n-grams guesses. copies: whether the text's n-grams are a source of guesses.
    """

    def __init__(self, shape: Shape | None, experience: Experience, *, copies: bool) -> None:
        self.shape, self.experience, self.copies = shape, experience, copies
        self.rows: dict[Row, RowRecord] = {}

    def step(self, batch: Batch, rows: Sequence[Row], pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        """A step of all rows, planned for those of `rows` that began, and learned from.

        Costs are CPU time of all threads: other programs that take a core make some steps many times as long on a wall
        clock, and how much of a step one thread runs varies.
        """
        known = [row for row in rows if row in self.rows]
        room = {row: row.request.max_new_tokens - len(row.ids) + len(row.request.prompt) for row in known}
        others = sum(not row.drafts for row in batch.live)
        plan = self.choose(room, others) if known else Plan(None)
        if plan.shape is not None and not all(row.seen for row in known):
            batch.catch_up(known)  # to read a text for the first time is not what a step costs
        began = time.process_time()
        results = batch.step(plan.shape, pieces=pieces, copied=plan.copied)
        seconds = time.process_time() - began
        gained = {row: output.tokens for result in results for row, output in result.rows if row in self.rows}
        whole = all(result.size == len(result.rows) == len(gained) + others for result in results)
        self.learn(plan, gained, seconds if whole and not pieces else None, others)
        return results

    def open(self, row: Row) -> None:
        """A row begins: its prompt is read and its first token chosen."""
        # A grammar's own tokens are better guesses than copied ones, and it would forbid many of these.
        index = NgramIndex((), TELLING, LONGEST) if self.copies and row.processor is None else None
        accepted = Acceptance(self.experience.accepted, RECOVERY)
        sampled, copied = row.request.sampling.temperature > 0, self.experience.copied
        self.rows[row] = RowRecord(accepted, copied, sampled, index, [*row.past, *row.ids])

    def close(self, row: Row) -> None:
        """A row ends. One that never began is ignored."""
        record = self.rows.pop(row, None)
        if record is not None and row.request.constraint is None:  # a grammar drops guesses and forces tokens
            self.experience.accepted += 0.5 * (record.accepted.ratio - self.experience.accepted)
            self.experience.copied += 0.5 * (record.ratio - self.experience.copied)

    def costs_of(self, rows: Sequence[Row], others: int = 0) -> StepCosts:
        """For this number of rows; until learned, what follows from those of fewer rows: little is tried in vain."""
        sampled, count = any(self.rows[row].sampled for row in rows), len(rows) + others
        known, key = self.experience.costs, (count, sampled)
        if (found := known.get(key)) is not None and found.learned:
            return found
        fewer = {n: c for (n, kind), c in known.items() if n < count and kind == sampled and c.learned}
        most = max(fewer, default=1)
        if found is None:
            found = known[key] = fewer.get(most, StepCosts()).of_rows(count / most)
        elif fewer:
            found.begin_with(fewer[most].of_rows(count / most))
        return found

    def choose(self, room: Mapping[Row, int], others: int = 0) -> Plan:
        """The next step of these rows, each with room for so many more tokens, and of others that never draft."""
        rows, count = list(room), len(room) + others
        if count > MOST_ROWS:
            return Plan(None)
        costs = self.costs_of(rows, others)
        if costs.node < MOST_NODE:
            for row in rows:
                self.rows[row].look_up()
        if costs.stale:
            return Plan(None)
        odds = {row: self.rows[row].odds() for row in rows}
        lengths, speed = best_chains([*(odds[row][: room[row] - 1] for row in rows), *[()] * others], costs)
        if self.shape is not None:
            accepted = sum(min(EXPECTED * self.rows[row].accepted.ratio, room[row] - 1) for row in rows)
            if (1 + accepted / count) / costs.of_draft > max(MIN_SPEEDUP, speed):
                return Plan(self.shape, {row: Copied(self.rows[row].chain, odds[row]) for row in rows if odds[row]})
        if speed < MIN_SPEEDUP:
            return Plan(None)
        return Plan(None, {row: Copied(self.rows[row].chain[:n]) for row, n in zip(rows, lengths, strict=False) if n})

    def learn(self, plan: Plan, gained: Mapping[Row, Sequence[int]], seconds: float | None, others: int = 0) -> None:
        """The step of this plan gave its rows these tokens and took this long; None if that time is not its own."""
        count = len(gained) + others
        if seconds is not None and gained and count <= MOST_ROWS:
            nodes = sum(len(copied.tokens) for copied in plan.copied.values()) / count
            self.costs_of(list(gained), others).learn(plan.shape is not None, nodes, seconds)
        for row, tokens in gained.items():
            record = self.rows[row]
            record.take(tokens)
            if plan.shape is not None:
                record.accepted.learn((len(tokens) - 1) / EXPECTED)
            else:
                record.accepted.recover()


def best_chains(odds: Sequence[Sequence[float]], costs: StepCosts) -> tuple[list[int], float]:
    """How many copied tokens of each row to verify, from their odds, and the speed relative to plain decoding.

    >>> best_chains([[0.9, 0.9, 0.2]], StepCosts(node=0.2))
    ([2], 1.9357142857142857)
    >>> best_chains([[0.1, 0.9], [0.9]], StepCosts(node=0.2))
    ([0, 1], 1.3181818181818181)
    """
    reached = sorted(((p, i) for i, row in enumerate(odds) for p in accumulate(row, mul)), reverse=True)
    lengths, tokens, speed = [0] * len(odds), float(len(odds)), 1.0
    for count, (probability, row) in enumerate(reached, 1):  # the most likely first
        found = (tokens + probability) / len(odds) / costs.of_chain(count / len(odds))
        if found <= speed:
            break
        tokens, speed = tokens + probability, found
        lengths[row] += 1
    return lengths, speed


def policy_for(drafter: Drafter, shape: Shape, experience: Experience) -> tuple[StepPolicy, Drafter]:
    """The policy of a drafter whose drafts have this shape, and what drafts: the host looks up n-grams itself."""
    if isinstance(drafter, NgramDrafter):
        return StepPolicy(None, experience, copies=True), drafter
    if isinstance(drafter, WithNgrams):
        return StepPolicy(shape, experience, copies=True), drafter.inner
    return StepPolicy(shape, experience, copies=False), drafter
