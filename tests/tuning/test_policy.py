"""What a step on a CPU does: never slower than plain decoding, and the text stays the same whatever is decided."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from redrafter import Engine, SamplingParams, Shape
from redrafter.drafters import NgramDrafter, WithNgrams
from redrafter.runtime import copied as module
from redrafter.runtime.copied import Copied
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput
from redrafter.targets import load_target
from redrafter.tuning.policy import (
    COMPARE_EVERY,
    MOST_COPIED,
    MOST_ROWS,
    Experience,
    Plan,
    StepCosts,
    StepPolicy,
    best_chains,
    policy_for,
)
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter

SHAPE = Shape(width=1, length=2)


def make_row(tokens: list[int], temperature: float = 0.0) -> Row:
    """A row whose prompt is read."""
    return Row(Request(prompt=tokens, max_new_tokens=99, seed=0, sampling=SamplingParams(temperature=temperature)), 0)


class World:
    """Texts whose drafts are right with a given probability, and steps of given costs."""

    def __init__(self, skill: float, period: int = 0, *, node: float = 0.2, drafted: float = 1.7) -> None:
        self.draw, self.skill = random.Random(1), skill
        self.costs = StepCosts(node, drafted)
        fresh = itertools.count(10)
        self.text: Iterator[int] = itertools.cycle(range(period)) if period else fresh
        self.seconds = self.tokens = 0.0

    def run(self, policy: StepPolicy, tokens: int) -> list[Plan]:
        text = [next(self.text) for _ in range(tokens)]
        row = make_row(text[:8])
        policy.open(row)
        done, plans = 8, []
        while done < tokens:
            plan = policy.choose({row: tokens - done})
            copied = list(plan.copied.get(row, Copied()).tokens)
            right = 0
            if plan.shape is not None:
                while right < plan.shape.length and self.draw.random() < self.skill:
                    right += 1
                cost = self.costs.drafted
            else:
                while right < len(copied) and copied[right : right + 1] == text[done + right : done + right + 1]:
                    right += 1
                cost = self.costs.of_chain(len(copied))
            gained = text[done : done + right + 1]
            policy.learn(plan, {row: gained}, 0.01 * cost * self.draw.uniform(0.95, 1.05))
            done += len(gained)
            self.seconds += cost
            self.tokens += len(gained)
            plans.append(plan)
        policy.close(row)
        return plans

    @property
    def speedup(self) -> float:
        return self.tokens / self.seconds


def policy(copies: bool = True) -> StepPolicy:
    return StepPolicy(SHAPE, Experience(), copies=copies)


def test_drafts_that_are_wrong_cost_little():
    world = World(skill=0.0)
    plans = world.run(policy(), 2000)
    drafted = [plan.shape is not None for plan in plans]
    assert world.speedup > 0.98
    assert 0 < sum(drafted[-500:]) < 25, "the drafter is tried again now and then"


def test_drafts_that_are_right_are_used():
    world = World(skill=0.9)
    plans = world.run(policy(), 1000)
    assert sum(plan.shape is not None for plan in plans) > 0.9 * len(plans)
    assert world.speedup > 1.4


def test_a_draft_that_costs_more_than_it_gives_is_given_up():
    world = World(skill=0.6, drafted=3.0)
    mine = policy()
    world.run(mine, 400)
    late = World(skill=0.6, drafted=3.0)
    late.run(mine, 1000)
    assert late.speedup > 0.97


def test_a_draft_that_became_cheaper_is_found_out():
    mine = policy()
    World(skill=0.7, drafted=4.0).run(mine, 300)
    world = World(skill=0.9, drafted=1.4)
    assert not any(plan.shape for plan in world.run(mine, 20)), "still thought to be slow"
    plans = world.run(mine, 2000)
    assert sum(plan.shape is not None for plan in plans[-200:]) > 150


def test_repeated_text_is_copied_in_long_chains():
    world = World(skill=0.0, period=30)
    plans = world.run(policy(), 600)
    assert max(len(chain.tokens) for plan in plans for chain in plan.copied.values()) == MOST_COPIED
    assert world.speedup > 2
    alone, _ = policy_for(NgramDrafter(), SHAPE, Experience())
    again = World(skill=1.0, period=30)
    assert all(plan.shape is None for plan in again.run(alone, 600)), "n-grams alone have no network to ask"
    assert again.speedup > 2


def test_texts_tell_the_next_ones_how_much_to_trust_a_match():
    """In some texts the end of a match says little. Twin: where matches go on, the next text copies at once."""
    for trusted in (False, True):
        mine = policy()
        for _ in range(6):
            row = make_row([3, 1, 2])
            mine.open(row)
            for step in range(40):
                mine.rows[row].look_up()
                mine.rows[row].take([3 if trusted else 10 + step, 1, 2])
            mine.close(row)
        assert (mine.experience.copied > 1.0) == trusted
        row = make_row([1, 2, 3, 1, 2])
        mine.open(row)
        mine.rows[row].look_up()
        assert (mine.rows[row].odds()[0] > 0.5) == trusted


def test_nothing_is_copied_where_the_drafter_has_no_ngrams():
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    mine, guesses = policy_for(drafter, SHAPE, Experience())
    assert (mine.copies, guesses) == (False, drafter)
    mine, guesses = policy_for(WithNgrams(drafter), SHAPE, Experience())
    assert (mine.copies, guesses) == (True, drafter), "the host looks up n-grams itself"


def test_a_chain_ends_where_the_text_must():
    mine = policy()
    mine.experience.costs[1, False] = costs = StepCosts()
    costs.learn(False, 0, 0.01)
    row = make_row([1, 2, 3, 4] * 4)
    mine.open(row)
    assert mine.choose({row: 3}).copied == {row: Copied([1, 2])}
    assert mine.choose({row: 1}) == Plan(None)


def test_many_rows_decode_plainly_and_copy_again_when_they_are_few():
    mine = policy()
    rows = [make_row([1, 2, 3, 4] * 4) for _ in range(MOST_ROWS + 1)]
    for row in rows:
        mine.open(row)
    for _ in range(5):
        assert mine.choose(dict.fromkeys(rows, 50)) == Plan(None)
        mine.learn(Plan(None), {row: [9] for row in rows}, 0.01)
    mine.learn(Plan(None), {rows[0]: [1, 2, 3, 4]}, 0.01)
    assert mine.choose({rows[0]: 4}).copied == {rows[0]: Copied([9, 9, 9])}, "the text of plain steps is known"


def test_costs_of_more_rows_follow_from_those_of_fewer():
    mine = policy()
    rows = [make_row([1]) for _ in range(MOST_ROWS)]
    for row in rows:
        mine.open(row)
    first = StepCosts()
    assert mine.costs_of(rows[:1]).confirmed == first.confirmed
    assert mine.costs_of(rows[:2]).confirmed == first.of_rows(2).confirmed
    two = mine.costs_of(rows[:2])
    two.confirmed, two.seen["drafted"] = (0.1, 1.2), 1  # as learned on a machine with many cores
    assert mine.costs_of(rows[:4]).confirmed == pytest.approx((0.2 / 1.1, 1 + 0.4 / 1.1))
    two.drafted = 9.0
    two.learn(False, 0, 0.01)
    assert mine.costs_of(rows[:2]).drafted < 9.0, "learned costs return slowly to the first ones, to be tried again"


def test_costs_of_many_rows_follow_what_one_row_learns_later():
    """A server whose first requests come together would otherwise keep the costs of a machine with two cores."""
    mine = policy()
    rows = [make_row([i, i + 1]) for i in range(4)]
    for row in rows:
        mine.open(row)
    before = mine.costs_of(rows).drafted
    one = mine.costs_of(rows[:1])
    one.confirmed, one.seen["drafted"] = (0.05, 1.1), 1
    assert mine.costs_of(rows).drafted < 1.4 < before
    four = mine.costs_of(rows)
    four.seen["drafted"], four.drafted = 1, 9.0
    assert mine.costs_of(rows).drafted == 9.0, "twin: learned costs stay"


def test_many_rows_never_try_a_draft_that_cannot_pay():
    """Each draft for eight rows that is tried in vain costs several plain steps; twin: a better drafter is used."""
    for skill, expected in ((1.0, False), (4.0, True)):
        mine = policy()
        rows = [make_row([i, i + 1]) for i in range(MOST_ROWS)]
        mine.experience.accepted = skill
        for row in rows:
            mine.open(row)
        drafted = False
        for _ in range(2000):
            plan = mine.choose(dict.fromkeys(rows, 50))
            drafted |= plan.shape is not None
            mine.learn(plan, {row: [9] * (1 + 3 * (plan.shape is not None)) for row in rows}, 0.01)
        assert drafted == expected


def test_nothing_is_looked_up_where_no_chain_can_pay():
    mine = policy()
    row = make_row([1, 2, 3, 4] * 4)
    mine.open(row)
    mine.experience.costs[1, False] = costs = StepCosts(node=0.95)
    costs.learn(False, 0, 0.01)
    assert mine.choose({row: 9}).shape is None or not mine.choose({row: 9}).copied
    assert mine.rows[row].match == 0


def test_a_row_with_a_grammar_copies_nothing_and_says_nothing_of_the_drafter():
    mine = policy()
    row = make_row([1, 2, 3, 4] * 4)
    row.processor, row.request = lambda logits, tree: logits, replace(row.request, constraint=object())
    mine.open(row)
    mine.learn(mine.choose({row: 9}), {row: [1]}, 0.01)
    plan = mine.choose({row: 9})
    assert (plan.shape, dict(plan.copied)) == (SHAPE, {})
    mine.learn(plan, {row: [1, 2, 3]}, 0.02)
    mine.close(row)
    mine.close(row)
    assert mine.experience.accepted == 1.0


def test_drafts_that_cost_far_more_than_they_give_are_tried_seldom():
    """As with several rows: the time lost is below half a percent."""
    for cost in (2.25, 3.3, 4.1):
        mine = StepPolicy(SHAPE, Experience(), copies=False)
        World(skill=0.55, drafted=cost).run(mine, 500)
        late = World(skill=0.55, drafted=cost)
        assert any(plan.shape for plan in late.run(mine, 6000)), "tried again"
        assert late.speedup > 0.995


def test_a_plain_step_is_taken_now_and_then_to_compare():
    plans = World(skill=0.9).run(policy(), 400)
    plain = [i for i, plan in enumerate(plans) if plan == Plan(None)]
    assert plain[0] == 0
    assert all(b - a <= COMPARE_EVERY + 1 for a, b in itertools.pairwise(plain))


def test_costs_follow_the_steps_and_not_one_that_was_disturbed():
    costs = StepCosts(node=0.1, drafted=1.2)
    for i in range(300):
        costs.learn(False, 0, 0.01)
        costs.learn(True, 0, 0.02 if i != 200 else 9.0)
        costs.learn(False, 4, 0.018)
    assert costs.drafted == pytest.approx(2.0, rel=0.05)
    assert costs.node == pytest.approx(0.2, rel=0.05)
    assert costs.plain == pytest.approx(0.01)


def test_the_first_draft_is_cold_and_does_not_end_drafting():
    costs = StepCosts(drafted=1.7)
    costs.learn(False, 0, 0.01)
    for _ in range(3):
        costs.learn(True, 0, 0.025)
        assert costs.drafted > costs.of_draft == 1.7
    costs.learn(True, 0, 0.025)
    assert costs.of_draft == costs.drafted > 1.7, "the twin: a fourth one tells"


def test_quite_other_costs_are_known_after_a_few_steps():
    costs = StepCosts(node=0.1, drafted=1.5)
    costs.learn(False, 0, 0.01)
    for _ in range(3):
        costs.learn(True, 0, 0.04)
        costs.learn(False, 4, 0.04)
    assert costs.drafted > 3
    assert costs.node > 0.5


def test_the_best_chains_are_the_best_of_all_lengths():
    draw = random.Random(2)
    for _ in range(50):
        odds = [[draw.random() for _ in range(draw.randrange(4))] for _ in range(draw.randrange(1, 4))]
        costs = StepCosts(node=draw.random() / 2)

        def speed(lengths: tuple[int, ...], odds: list[list[float]] = odds, costs: StepCosts = costs) -> float:
            reached = [math.prod(row[: d + 1]) for row, n in zip(odds, lengths, strict=True) for d in range(n)]
            return (1 + sum(reached) / len(odds)) / costs.of_chain(sum(lengths) / len(odds))

        lengths, found = best_chains(odds, costs)
        assert found == pytest.approx(max(map(speed, itertools.product(*(range(len(row) + 1) for row in odds)))))
        assert found == pytest.approx(speed(tuple(lengths)))


def test_only_rows_that_repeat_themselves_are_copied_for():
    mine = policy()
    mine.experience.costs[2, False] = costs = StepCosts(node=0.3, drafted=3.0)
    costs.learn(False, 0, 0.01)
    rows = [make_row([1, 2, 3, 4] * 4), make_row(list(range(10, 26)))]
    for row in rows:
        mine.open(row)
    plan = mine.choose(dict.fromkeys(rows, 50))
    assert plan.copied.keys() == {rows[0]}
    mine.learn(plan, {rows[0]: [1], rows[1]: [9]}, 0.01 * costs.of_chain(len(plan.copied[rows[0]].tokens) / 2))
    assert costs.node == pytest.approx(0.3), "half as many nodes a row"


def test_a_twin_with_the_same_past_decides_the_same():
    mine, twin = policy(), policy()
    one, other = (World(0.5, period=40).run(each, 500) for each in (mine, twin))
    assert [(p.shape, [*p.copied.values()]) for p in one] == [(p.shape, [*p.copied.values()]) for p in other]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_whatever_is_decided(monkeypatch, temperature):
    """Random plans: drafts, chains right and wrong, plain steps; the drafter catches up with what it has missed."""
    draw, kinds = random.Random(3), set()
    target = load_target(make_model())
    engine = Engine(target, WithNgrams(recurrent_drafter(target)))
    assert engine.experience is not None
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 5}
    texts = [c.tokens for c in engine.plain().generate(PROMPTS, **options)]
    wanted = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}

    def choose(self, room, others):
        assert others == 0
        kind = draw.choice(["draft", "plain", "chain"])
        kinds.add(kind)
        copied = {}
        for row, left in room.items() if kind != "plain" else ():
            text = wanted[tuple(row.request.prompt)]
            so_far = 24 - left
            right = text[so_far : so_far + draw.randrange(MOST_COPIED)]
            tokens = [*right, draw.randrange(VOCAB)][:MOST_COPIED]
            if draw.random() < 0.7:
                copied[row] = Copied(tokens, [draw.random() for _ in tokens])
        return Plan(self.shape if kind == "draft" else None, copied)

    monkeypatch.setattr(StepPolicy, "choose", choose)
    for size in (1, 3):
        assert [c.tokens for c in engine.generate(PROMPTS, batch_size=size, **options)] == texts
    true = module.chain_tree

    def blind(last, chains):
        tree = true(last, chains)
        return replace(tree, mask=tree.mask & tree.mask.transpose(1, 2))

    monkeypatch.setattr(module, "chain_tree", blind)
    wrong = [c.tokens for c in engine.generate(PROMPTS, **options)]
    assert wrong != texts, "chains whose tokens do not see each other must show"
    assert kinds == {"draft", "plain", "chain"}


def test_a_fixed_shape_is_always_drafted():
    target = load_target(make_model())
    engine = Engine(target, WithNgrams(recurrent_drafter(target)), shape=SHAPE)
    assert engine.experience is None
    done = engine.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    assert done.stats.nodes == 2 * done.stats.steps
    free = Engine(target, engine.drafter)
    assert free.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).tokens == done.tokens
    assert free.experience is not None
    assert free.experience.costs[1, False].plain > 0


@pytest.mark.parametrize(("pieces", "fresh"), [(0, 0), (9, 0), (0, 1)])
def test_steps_that_do_more_than_those_of_known_rows_tell_no_cost(pieces: int, fresh: int) -> None:
    """Prompts that are read, and rows that have just begun; twin: a step of the known rows alone does."""
    mine, row = policy(), make_row([1, 2, 3])
    mine.open(row)
    given = [(each, RowOutput([7], steps=1)) for each in [row, *(make_row([4]) for _ in range(fresh))]]
    batch: Any = SimpleNamespace(live=[row], step=lambda *_, **__: [StepResult(None, given, len(given), 0.01)])
    mine.step(batch, [row], {row: pieces} if pieces else {})
    assert (mine.experience.costs[1, False].seen["plain"] == 1) == (not pieces and not fresh)
    assert mine.rows[row].new[-1] == 7, "the text is known"


def test_rows_that_never_draft_are_part_of_a_steps_cost() -> None:
    """Else one of them beside others would leave these without a measured step, and so without drafts."""
    for others, drafted in ((0, True), (1, True), (MOST_ROWS - 1, False), (MOST_ROWS, False)):
        mine, row = policy(copies=False), make_row([1, 2, 3])
        mine.experience.accepted = 4.0
        mine.open(row)
        plain = [make_row([4]) for _ in range(others)]
        for each in plain:
            each.drafts = False
        shapes = []

        def step(shape: Shape | None, row: Row = row, plain: list[Row] = plain, shapes: Any = shapes, **_: Any) -> Any:
            shapes.append(shape)
            given = [(row, RowOutput([7, 8, 9] if shape else [7], steps=1))]
            given += [(each, RowOutput([7], steps=1)) for each in plain]
            return [StepResult(shape, given, len(given), 0.01)]

        batch: Any = SimpleNamespace(live=[row, *plain], step=step, catch_up=lambda rows: None)
        for _ in range(6):
            mine.step(batch, [row])
        assert (SHAPE in shapes) == drafted, f"{others} others"
        assert mine.experience.costs.keys() == ({(1 + others, False)} if others < MOST_ROWS else set())


def test_a_row_copies_from_past_answers_before_its_own_text() -> None:
    policy, _ = policy_for(NgramDrafter(), SHAPE, Experience())
    request = Request(prompt=[1, 2, 3], max_new_tokens=9, seed=0)
    for past, chain, match in (([1, 2, 3, 7, 8, 9], [7, 8, 9, 1], 3), ([], [], 0)):
        row = Row(request, 0, past=past)
        policy.open(row)
        policy.rows[row].look_up()
        assert policy.rows[row].chain[:4] == chain
        assert policy.rows[row].match == match
