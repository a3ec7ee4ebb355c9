"""Steps of simulated cost: drafts that fail cost little time, drafts that pay are never given up."""

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from redrafter.config import Shape
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput
from redrafter.tuning import account as module
from redrafter.tuning.account import CREDIT, SHARE, AccountPolicy, DraftAccount, Size, StepTimes

TREE = Shape(width=16, length=5, nodes=63)
ROW = Row(Request(prompt=[1], max_new_tokens=1000, seed=0), 0)
ONE = Size(1, 1, 11, sampled=False)
PLAIN, DRAFTED, CATCH_UP, RECORDING = 0.0039, 0.0051, 0.001, 2.0  # seconds at the cost of a 7B model on an H200


class World:
    """A batch of one row whose steps cost what we say. Results come one step late, as those of recorded steps do."""

    rows, context = 1, 1024

    def __init__(self, tokens: Callable[[int], int], drafted: float = DRAFTED, noise: float = 0.0) -> None:
        self.tokens, self.drafted, self.noise = tokens, drafted, noise
        self.chance = random.Random(1)
        self.recorded: set[Shape | None] = set()
        self.under_way: list[tuple[Shape | None, float, int]] = []
        self.before: Shape | None = TREE
        self.launched: list[Shape | None] = []
        self.seconds = 0.0  # of all steps, recordings not counted
        self.written = 0

    def places(self, rows: int) -> int:
        return rows

    def step(self, shape: Shape | None, *, pieces: Mapping[Row, int] | None = None) -> list[StepResult]:
        assert not pieces
        if shape is not None and self.before is None and self.under_way:
            return self._results(len(self.under_way))
        seconds = PLAIN if shape is None else self.drafted
        if shape is not None and self.before is None:
            seconds += CATCH_UP
        gained = 1 if shape is None else self.tokens(self.written)
        self.written += gained
        self.seconds += seconds
        if shape not in self.recorded and self.under_way:  # the step under way ends while the next one is recorded
            self.under_way[-1] = (self.under_way[-1][0], RECORDING, self.under_way[-1][2])
        self.recorded.add(shape)
        self.before = shape
        self.launched.append(shape)
        seen = seconds * (50 if self.chance.random() < self.noise else 1)  # somebody reads the stream slowly
        self.under_way.append((shape, seen, gained))
        return self._results(len(self.under_way) - 1)

    def _results(self, count: int) -> list[StepResult]:
        done, self.under_way = self.under_way[:count], self.under_way[count:]
        return [StepResult(s, [(ROW, RowOutput([7] * n, steps=1))], 1, seconds) for s, seconds, n in done]

    def run(self, account: DraftAccount, tokens: int) -> "World":
        """One text of so many tokens."""
        policy, end = AccountPolicy(account), self.written + tokens
        policy.open(ROW)
        while self.written < end:
            policy.step(self, [ROW])  # type: ignore[arg-type]
        self.under_way = []
        return self

    @property
    def slowdown(self) -> float:
        return self.seconds / (self.written * PLAIN)


def useless(_: int) -> int:
    return 1


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_drafter_that_is_always_wrong_costs_little(noise: float) -> None:
    account = DraftAccount(TREE)
    first = World(useless, noise=noise).run(account, 200)
    assert first.slowdown < 1.05
    assert first.launched[0] == TREE
    assert first.launched.count(None) > 150
    assert World(useless, noise=noise).run(account, 200).slowdown < 1.03, "the costs are known by now"


@pytest.mark.parametrize("cost", [1.05, 1.3, 2.5])
def test_no_text_is_much_slower_than_plain_once_costs_are_known(cost: float) -> None:
    """Drafts that are good and bad by turns, at random."""
    account, chance = DraftAccount(TREE), random.Random(cost)
    World(useless, PLAIN * cost).run(account, 300)
    for _ in range(20):
        period, most = chance.randint(5, 200), chance.randint(1, 4)
        world = World(lambda i, p=period, m=most: chance.randint(1, m) if i // p % 2 else 1, PLAIN * cost)
        world.run(account, 1000)
        assert world.slowdown < 1 + SHARE + (CREDIT + 2 * cost + 1) / 1000


def test_twin_without_the_price_of_a_draft_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "cost", lambda *_: 1.0)
    assert World(useless).run(DraftAccount(TREE), 1000).slowdown > 1.1


@pytest.mark.parametrize("most", [4, 5, 6])
def test_a_good_drafter_drafts_in_every_step_and_nothing_more_is_recorded(most: int) -> None:
    account, chance = DraftAccount(TREE), random.Random(most)
    world = World(lambda _: max(1, chance.randint(most - 3, most)))
    for _ in range(10):
        world.run(account, 500)
    assert world.recorded == {TREE}


def test_a_drafter_that_becomes_good_is_used_again() -> None:
    account, chance = DraftAccount(TREE), random.Random(3)
    world = World(lambda i: chance.randint(2, 6) if i > 600 else 1)
    world.run(account, 600)
    assert world.launched.count(TREE) < 60
    begin = len(world.launched)
    world.run(account, 1000)
    again = world.launched[begin:]
    first = again.index(TREE)
    assert first < 150
    assert again[first:].count(None) == 0


def test_a_new_text_tries_the_drafter_at_once() -> None:
    account = DraftAccount(TREE)
    World(useless).run(account, 600)
    account.balance = -0.5
    world = World(lambda _: 4).run(account, 100)
    assert world.launched.count(None) < 3


def test_tries_are_rarer_where_they_cost_more() -> None:
    def tries(drafted: float) -> int:
        account = DraftAccount(TREE)
        World(useless, drafted).run(account, 400)
        return World(useless, drafted).run(account, 3000).launched.count(TREE)

    assert 0 < tries(3 * PLAIN) < tries(1.5 * PLAIN) < tries(1.1 * PLAIN)


def test_a_plain_step_is_measured_after_long_drafting_unless_drafting_clearly_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small model: drafts seem to pay by the assumed cost and do not."""
    monkeypatch.setattr(module, "DOUBTFUL", 15.0)
    doubtful, clear = (World(lambda _, n=n: n, 2.5 * PLAIN).run(DraftAccount(TREE), 8000) for n in (2, 4))
    assert doubtful.launched[:100].count(None) == 0
    assert doubtful.launched[-500:].count(None) > 480
    assert clear.recorded == {TREE}


def test_a_measured_cost_is_a_guide_for_other_sizes() -> None:
    account = DraftAccount(TREE)
    eight = ONE._replace(rows=8, places=8)
    assumed = account.cost(eight)
    assert assumed > 1.5 * account.cost(ONE), "more rows, more tokens to verify"
    World(useless, 2.5 * PLAIN).run(account, 100)
    assert account.cost(ONE) == pytest.approx(2.5)
    assert account.cost(eight) > 1.3 * assumed


@pytest.mark.parametrize("rows", [1, 32, 64, 256])
def test_many_rows_whose_drafts_pay_come_back_from_plain_steps(rows: int) -> None:
    """Their assumed cost is so high that plain steps are measured before steps with a draft are."""
    account, size, drafted = DraftAccount(TREE), Size(rows, rows, 11, sampled=False), 0
    for _ in range(300):
        if account.pays(size):
            drafted += 1
            account.learn(size, "drafted", 6.0, 1.5 * PLAIN)
        else:
            account.learn(size, "plain", 1.0, PLAIN)
    assert drafted > 280


@pytest.mark.parametrize("cost", [4.0, 12.0])
def test_costly_drafts_that_fail_take_a_small_share_of_a_long_text(cost: float) -> None:
    world = World(useless, drafted=cost * PLAIN).run(account := DraftAccount(TREE), 500)
    before = world.seconds
    world.run(account, 5000)
    assert (world.seconds - before) / (5000 * PLAIN) < 1.02


@pytest.mark.parametrize(("steps", "read", "learned"), [(1, 0, [PLAIN]), (1, 40, [None]), (0, 0, [])])
def test_first_tokens_and_prompts_that_are_read_measure_no_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, read: int, learned: list[float | None]
) -> None:
    """A pass that also reads a prompt takes longer, a row's first step has no draft; twin: other steps are timed."""
    told = StepResult(TREE, [(ROW, RowOutput([7], steps=steps))], 1, PLAIN, read)
    batch: Any = SimpleNamespace(rows=1, context=1024, places=lambda rows: rows, step=lambda *_, **__: [told])
    seconds: list[float | None] = []
    monkeypatch.setattr(DraftAccount, "learn", lambda *given: seconds.append(given[-1]))
    AccountPolicy(DraftAccount(TREE)).step(batch, [ROW], {ROW: read} if read else {})
    assert seconds == learned
