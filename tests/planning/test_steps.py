"""Planned steps of the running batch: the text stays the same whatever is decided, and time is counted where it is."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.drafters import NgramDrafter, WithNgrams
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.costs import ON_CPU, ON_GPU
from redrafter.planning.late import LatePlanner
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.planning.steps import PlannedSteps, planner_for
from redrafter.runtime import copied as module
from redrafter.runtime.copied import Copied
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput
from redrafter.targets import load_target
from tests.helpers.planning import SHAPE, make_row
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter


def test_nothing_is_copied_where_the_drafter_has_no_ngrams():
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    planner, guesses = planner_for(drafter, SHAPE)
    assert (planner.copies, planner.shape, guesses) == (False, SHAPE, drafter)
    planner, guesses = planner_for(WithNgrams(drafter), SHAPE)
    assert (planner.copies, planner.shape, guesses) == (True, SHAPE, drafter), "the host looks up n-grams itself"
    alone = NgramDrafter()
    planner, guesses = planner_for(alone, SHAPE)
    assert (planner.copies, planner.shape, guesses) == (True, None, alone)


@pytest.mark.parametrize(("device", "first"), [("cpu", ON_CPU), ("cuda", ON_GPU)])
def test_prices_begin_with_those_of_the_device_under_every_rule(device, first):
    """So a profile of this machine has prices of the same features."""
    planner, _ = planner_for(NgramDrafter(), SHAPE, torch.device(device), 2, seeded=False)
    assert isinstance(planner, LatePlanner)
    assert planner.costs.first == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_whatever_is_decided(monkeypatch, temperature):
    """Random plans: drafts cut at random, chains right and wrong, plain steps; the drafter catches up with these."""
    draw, kinds, cut = random.Random(3), set(), []
    target = load_target(make_model())
    engine = Engine(target, WithNgrams(recurrent_drafter(target)))
    assert engine.planner is not None
    engine.planner.shape = Shape(width=3, length=3)
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 5}
    texts = [c.tokens for c in engine.plain().generate(PROMPTS, **options)]
    wanted = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}

    def choose(self, room, others, slots):
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
        node = draw.choice([0.0, 0.005, 0.05])
        cut.append(node)
        return Plan(
            self.shape if kind == "draft" else None,
            copied,
            price=lambda nodes: node * nodes,
            trust=dict.fromkeys(room, 1.0),
            room={row: left - 1 for row, left in room.items()},
            most=5,
        )

    monkeypatch.setattr(Planner, "choose", choose)
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
    engine = Engine(target, WithNgrams(recurrent_drafter(target)), shape=Shape(width=1, length=2))
    assert engine.planner is None
    done = engine.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    assert done.stats.nodes == 2 * done.stats.steps
    free = Engine(target, engine.drafter)
    assert free.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).tokens == done.tokens
    assert free.planner is not None
    assert free.planner.costs.known


def test_statistics_say_what_was_expected_of_the_steps():
    target = load_target(make_model())
    engine = Engine(target, NgramDrafter())
    stats = engine.generate([3, 4, 5] * 8, max_new_tokens=60, ignore_eos=True).stats
    assert stats.nodes > 0
    assert 0 < stats.expected < stats.nodes
    fixed = Engine(target, NgramDrafter(), shape=Shape(width=1, length=2))
    assert fixed.generate([3, 4, 5] * 8, max_new_tokens=60, ignore_eos=True).stats.expected == 0, "nothing was planned"


@pytest.mark.parametrize(("pieces", "fresh"), [(0, 0), (9, 0), (0, 1)])
def test_steps_that_do_more_than_those_of_known_rows_tell_no_cost(pieces: int, fresh: int) -> None:
    """Prompts that are read, and rows that have just begun; twin: a step of the known rows alone does."""
    steps, row = PlannedSteps(Planner(SHAPE, copies=True)), make_row([1, 2, 3])
    steps.open(row)
    given = [(each, RowOutput([7], steps=1)) for each in [row, *(make_row([4]) for _ in range(fresh))]]
    batch: Any = SimpleNamespace(live=[row], step=lambda *_, **__: [StepResult(None, given, len(given), 0.01)])
    steps.step(batch, [row], {row: pieces} if pieces else {})
    assert steps.planner.costs.known == (not pieces and not fresh)
    source = steps.planner.rows[row].source
    assert source is not None
    assert source.new[-1] == 7, "the text is known"


def test_rows_that_never_draft_are_part_of_a_steps_cost() -> None:
    """Else one of them beside others would leave these without a measured step, and so without drafts."""
    planner, row, plain = Planner(SHAPE, copies=False), make_row([1, 2, 3]), make_row([4])
    plain.drafts = False
    steps = PlannedSteps(planner)
    steps.open(row)
    seen: list[tuple[int, int]] = []

    def learn(plan: Plan, gained: Any, seconds: Any, others: int, slots: int) -> None:
        assert seconds is not None
        seen.append((len(gained), others))

    planner.learn = learn  # type: ignore[method-assign]
    given = [(row, RowOutput([7, 8, 9], steps=1)), (plain, RowOutput([7], steps=1))]
    batch: Any = SimpleNamespace(
        live=[row, plain], step=lambda *_, **__: [StepResult(None, given, 2, 0.01)], catch_up=lambda rows: None
    )
    steps.step(batch, [row])
    assert seen == [(1, 1)]


def test_a_row_copies_from_past_answers_before_its_own_text() -> None:
    planner, _ = planner_for(NgramDrafter(), SHAPE)
    steps, request = PlannedSteps(planner), Request(prompt=[1, 2, 3], max_new_tokens=9, seed=0)
    for past, chain in (([1, 2, 3, 7, 8, 9], [7, 8, 9, 1]), ([], [])):
        row = Row(request, 0, past=past)
        steps.open(row)
        source = planner.rows[row].source
        assert source is not None
        assert list(source.look_up(9).tokens[:4]) == chain
