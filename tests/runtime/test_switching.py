"""Recorded steps that draft and decode plainly in any order: the text of plain decoding, and the same guesses."""

import random
from typing import Any

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.core.tree import root_tree
from redrafter.drafters import NgramDrafter, NoDrafter, WithNgrams
from redrafter.planning.late import Action, LatePlanner
from redrafter.planning.steps import late_planner
from redrafter.runtime import batch as batch_module
from redrafter.runtime import recorded
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import FlatPasses, PaddedStepPass
from redrafter.runtime.recorded import RecordedSteps
from redrafter.runtime.row import Request
from redrafter.runtime.state import BatchState, tensors_of
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets import load_target
from tests.helpers.clock import Clock
from tests.helpers.zoo import PROMPTS, VOCAB, OracleDrafter, make_model, recurrent_drafter

SHAPE = Shape(width=3, length=4, nodes=9)


def switching(target: Any, drafter: Any) -> Engine:
    """An engine whose steps run over fixed buffers and that chooses as on a GPU."""
    engine = Engine(target, drafter, shape=SHAPE, runtime="graphs")
    engine.recorded = True
    engine.planner, engine.guesses = late_planner(SHAPE, 2), drafter
    return engine


@pytest.fixture
def chosen(monkeypatch) -> list[Action]:
    """Steps draft or not, by any beam and with any number of nodes, as chance wants."""
    draw, made = random.Random(4), []

    def choose(self, load, drafts, ready):
        made.append(draw.choice([draw.choice(drafts), Action(None, 0, load.tokens)]))
        return made[-1]

    monkeypatch.setattr(LatePlanner, "choose", choose)
    return made


def texts_by(engine: Engine, temperature: float) -> list[list[int]]:
    """Seven ragged requests in two rows: rows end and join all the time."""
    prompts = [*PROMPTS, [9, 9], [4]]
    budgets = [3, 30, 17, 1, 24, 2, 20]
    options = {"temperature": temperature, "seed": 5}
    asked = [engine.requests([p], max_new_tokens=n, **options)[0] for p, n in zip(prompts, budgets, strict=True)]
    asked = [type(r)(**(vars(r) | {"eos": (11, 23) if i % 2 else ()})) for i, r in enumerate(asked)]
    done = engine.complete(asked, rows=2)
    assert all(c.stats.steps >= c.stats.plain_steps for c in done)
    return [c.tokens for c in done]


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1.0), (torch.float64, 0.0)])
def test_the_text_is_the_same_whatever_is_chosen(chosen, monkeypatch, dtype, temperature):
    target = load_target(make_model("llama", dtype))
    want = texts_by(Engine(target, NoDrafter()), temperature)
    inner = recurrent_drafter(target, memory_heads=2, memory_size=8)
    for drafter in (inner, WithNgrams(inner), NgramDrafter(2, 1)):
        assert texts_by(switching(target, drafter), temperature) == want
    assert sum(action.shape is None for action in chosen) > 20
    assert len({(action.shape, action.nodes) for action in chosen}) > (6 if dtype is torch.float32 else 2)
    draft = StepDrafter.draft

    def blind(self, state, last, search):  # twin: a plain step that reads another token than the last
        return draft(self, state, last, search) if self.guesses else root_tree((last + 1) % VOCAB)

    monkeypatch.setattr(StepDrafter, "draft", blind)
    assert texts_by(switching(target, inner), temperature) != want


def test_a_drafter_that_knows_the_text_is_right_after_plain_steps(chosen, monkeypatch):
    target = load_target(make_model())
    options = {"max_new_tokens": 40}
    want = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, **options)]

    def accepted() -> float:
        """Of each step with a draft, the last step left out: the text ends there."""
        engine = switching(target, OracleDrafter(PROMPTS, want, skill=1.0))
        done = engine.generate(PROMPTS, **options)
        assert [c.tokens for c in done] == want
        drafted = sum(c.stats.steps - c.stats.plain_steps - 1 for c in done)
        assert sum(c.stats.plain_steps for c in done) > 10
        return sum(sum(c.stats.accepted_per_step[:-1]) for c in done) / drafted

    assert accepted() > SHAPE.length - 0.3
    monkeypatch.setattr(BatchState, "catch_up", lambda *_: None)  # twin: plain steps pass the drafter by
    assert accepted() < 0.6 * SHAPE.length


def test_plain_steps_leave_the_drafter_the_state_that_drafts_leave(monkeypatch):
    target = load_target(make_model())
    drafter = WithNgrams(recurrent_drafter(target, memory_heads=2, memory_size=8))
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}

    def state(plain: bool) -> list[torch.Tensor]:
        draw, engine = random.Random(2), switching(target, drafter)

        def choose(self, load, drafts, ready, steps=[]):  # noqa: B006 - counts its calls
            steps.append(1)
            none = plain and len(steps) < 20 and draw.random() < 0.6
            return Action(None, 0, load.tokens) if none else drafts[0]

        with monkeypatch.context() as patch:
            patch.setattr(LatePlanner, "choose", choose)
            done = engine.generate(PROMPTS[0], **options)
        assert (done.stats.plain_steps > 5) is plain
        (batch,) = engine._idle
        return [x[0].clone() for x in tensors_of(batch.state.rows.state.inner)]

    drafted = state(plain=False)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(state(plain=True), drafted, strict=True))
    remember, verify = StepDrafter.remember, PaddedStepPass._verify

    def forgets(self):  # twin: a plain step keeps no hidden states
        kept = self.history.clone()
        verify(self)
        if not self.tree.nodes:
            self.history.copy_(kept)

    monkeypatch.setattr(PaddedStepPass, "_verify", forgets)
    monkeypatch.setattr(StepDrafter, "remember", lambda self, h: remember(self, h) if self.guesses else None)
    assert not all(torch.allclose(a, b, atol=1e-9) for a, b in zip(state(plain=True), drafted, strict=True))


def test_a_given_shape_and_a_grammar_are_no_matter_of_choice(chosen):
    target = load_target(make_model())
    engine = switching(target, recurrent_drafter(target))
    keep = [lambda ids, scores: scores]
    assert engine.generate(PROMPTS[0], max_new_tokens=9, logits_processor=keep).stats.plain_steps == 0
    engine.planner = None
    assert engine.generate(PROMPTS[0], max_new_tokens=9).stats.plain_steps == 0
    assert not chosen
    assert Engine(target, engine.drafter, shape=SHAPE).planner is None


def test_a_plain_step_is_recorded_when_it_is_first_wanted(monkeypatch):
    """Drafts that are always wrong: they lose a few steps' time, then nearly all steps are plain."""
    monkeypatch.setattr(LatePlanner, "seconds", lambda _, action, load: 0.004 if action.shape is None else 0.006)
    target = load_target(make_model())
    want = Engine(target, NoDrafter()).generate(PROMPTS[0], max_new_tokens=80).tokens
    engine = switching(target, OracleDrafter(PROMPTS[:1], [want], skill=0.0))
    assert engine.generate(PROMPTS[0], max_new_tokens=8).tokens == want[:8]
    (batch,) = engine._idle
    assert [kind.shape for kind in batch.steps.steps] == [None, SHAPE], "a row's first step, and those that draft"
    done = engine.generate(PROMPTS[0], max_new_tokens=80)
    assert done.tokens == want
    assert done.stats.plain_steps > 0.7 * done.stats.steps
    assert [(kind.shape, kind.follows) for kind in batch.steps.steps][2:] == [(None, False)]


def test_the_time_of_a_step_is_without_its_recording(monkeypatch):
    target = load_target(make_model())
    clock, record = Clock(), RecordedSteps._record

    def slow(self, *arguments):
        clock.now += 10
        return record(self, *arguments)

    monkeypatch.setattr(recorded, "time", clock)
    monkeypatch.setattr(batch_module, "time", clock)
    monkeypatch.setattr(RecordedSteps, "_record", slow)
    batch = Batch(target, recurrent_drafter(target), rows=1, context=60, shapes=[SHAPE], recorded=True)
    batch.read_all([batch.open(Request(prompt=PROMPTS[0], max_new_tokens=9, seed=1))])
    assert batch.step(SHAPE) == [], "recorded: the result comes late"
    began = clock.now
    (under_way,) = batch.step(None)
    assert clock.now - began > 10, "recorded too"
    assert under_way.seconds > 10, "the step waited to be read while the next one was recorded"
    (alone,) = batch.drain()
    assert alone.seconds < 1
    batch.reset()
    batch.steps.steps.clear()
    batch.read_all([batch.open(Request(prompt=PROMPTS[0], max_new_tokens=9, seed=1))])
    batch.step(SHAPE)
    (first,) = batch.drain()
    assert first.seconds < 1


def test_the_time_of_a_step_is_without_the_recording_of_another_pass(monkeypatch):
    """Of more nodes than before. Its parts are measured too, and the text is that of plain decoding."""
    target = load_target(make_model("llama", torch.float32))
    want = Engine(target, NoDrafter()).generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).tokens
    clock, record = Clock(), FlatPasses._record

    def slow(self, *arguments):
        clock.now += 10
        return record(self, *arguments)

    for module in (recorded, batch_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(FlatPasses, "_record", slow)
    batch = Batch(target, recurrent_drafter(target), rows=1, context=60, shapes=[SHAPE], recorded=True)
    row = batch.open(Request(prompt=PROMPTS[0], max_new_tokens=12, seed=1))
    batch.read_all([row])
    for budget in (1, 1, 3, 7, 1):
        before, result = clock.now, None
        if row.open:
            batch.step(SHAPE, budget=budget)
            (result,) = batch.drain()
            assert (result.seconds < 1, len(result.parts)) == (True, 2), budget
            assert (clock.now - before > 10) or budget == 1
    while len(row.ids) < len(PROMPTS[0]) + 12:
        batch.step(SHAPE, budget=3)
        batch.drain()
    assert row.ids[len(PROMPTS[0]) :] == want


def test_a_step_promises_for_each_budget_what_the_host_may_choose(monkeypatch):
    """The device picks the nodes, as many as the host asked for, and the statistics say what was expected of them."""
    target = load_target(make_model("llama", torch.float32))
    engine, seen = switching(target, recurrent_drafter(target)), []
    learn = LatePlanner.learn

    def watch(self, load, action, result, budgets, resumed):
        learn(self, load, action, result, budgets, resumed)
        seen.extend((action.nodes, budgets, output) for _, output in result.rows if action.shape and output.steps)

    monkeypatch.setattr(LatePlanner, "learn", watch)
    monkeypatch.setattr(LatePlanner, "choose", lambda self, load, drafts, ready: drafts[len(seen) % len(drafts)])
    stats = engine.generate(PROMPTS[0], max_new_tokens=30, ignore_eos=True).stats
    assert stats.expected == pytest.approx(sum(output.expected for *_, output in seen))
    assert len({nodes for nodes, *_ in seen}) > 3
    for nodes, budgets, output in seen:
        assert output.nodes <= nodes
        assert output.promised == sorted(output.promised)
        assert 0 <= output.promised[budgets.index(nodes)] <= nodes
    assert any(output.nodes == nodes for nodes, _, output in seen)
