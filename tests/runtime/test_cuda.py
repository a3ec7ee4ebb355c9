"""What only a GPU can show: the same numbers as the CPU, and a step that never waits for the host."""

import copy
import random
import shutil
from dataclasses import replace

import pytest
import torch

from redrafter import Engine, Grammar, RuleConfig, Shape
from redrafter.config import SamplingParams
from redrafter.core.noise import SEEDED, gumbel, uniform
from redrafter.core.rules import make_rule
from redrafter.core.step import step
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.errors import OutOfMemory
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.runtime.batch import Batch
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.eager import EagerSteps
from redrafter.runtime.row import Request
from redrafter.runtime.state import assign
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets import load_target
from redrafter.train.trainer import train
from tests.helpers.bytes import byte_target
from tests.helpers.toys import CONFIG, OPTIONS, make_texts
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, make_model, recurrent_drafter
from tests.runtime.test_batch import SHAPES as BATCH_SHAPES
from tests.runtime.test_batch import requests, serve
from tests.runtime.test_switching import SHAPE as SWITCHING_SHAPE
from tests.runtime.test_switching import texts_by

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch.compile has several
]


def cuda_target(kind: str = "llama"):
    return load_target(copy.deepcopy(make_model(kind)).cuda())


def test_noise_is_that_of_the_cpu():
    seeds, where = torch.arange(40) * 977, torch.arange(30).expand(40, -1)
    kw = {"stream": SEEDED, "dtype": torch.float64}
    cpu = uniform(seeds, where, 500, **kw)
    assert torch.equal(uniform(seeds.cuda(), where.cuda(), 500, **kw).cpu(), cpu), "bit for bit before the logarithm"
    assert torch.allclose(
        gumbel(seeds.cuda(), where.cuda(), 500, **kw).cpu(), gumbel(seeds, where, 500, **kw), rtol=1e-14
    )


def drafters_for(target):
    own = recurrent_drafter(target)
    return (own, ModelDrafter(target, target), NgramDrafter(2, 1), WithNgrams(own))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_speculative_is_plain_and_is_the_cpus(kind):
    target = cuda_target(kind)
    for options in ({}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}):
        options = options | {"max_new_tokens": 16}
        cpu = Engine(load_target(make_model(kind)), NoDrafter()).generate(PROMPTS, **options)
        for runtime in ("eager", "graphs"):
            plain = [c.tokens for c in Engine(target, NoDrafter(), runtime=runtime).generate(PROMPTS, **options)]
            assert plain == [c.tokens for c in cpu]
            for drafter in drafters_for(target):
                engine = Engine(target, drafter, shape=Shape(width=3, length=4, nodes=9), runtime=runtime)
                assert [c.tokens for c in engine.generate(PROMPTS, **options)] == plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["own attention", "tree kernel"])
def test_compiled_texts_are_the_cpus(dtype):
    model = make_model("llama", dtype)
    target = load_target(copy.deepcopy(model).cuda())
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        options = options | {"max_new_tokens": 16}
        cpu = [c.tokens for c in Engine(load_target(model), NoDrafter()).generate(PROMPTS[:2], **options)]
        for drafter in (NoDrafter(), recurrent_drafter(target), WithNgrams(recurrent_drafter(target))):
            engine = Engine(target, drafter, shape=Shape(width=3, length=4, nodes=9), runtime="compiled")
            assert [c.tokens for c in engine.generate(PROMPTS[:2], **options)] == cpu
            assert engine.recorded


def test_a_cache_too_large_is_refused_in_a_line():
    target = cuda_target()
    target.max_positions = 1 << 30
    with pytest.raises(OutOfMemory, match="does not fit"):
        Engine(target, NoDrafter(), runtime="graphs").generate([1, 2], max_new_tokens=1 << 29)


@pytest.mark.parametrize("rule", ["seeded", "rejection", "typical"])
@pytest.mark.parametrize("draft", ["recurrent", "ngram", "recurrent+ngram"])
def test_a_step_never_waits_for_the_host(rule, draft):
    """torch raises on any synchronising call inside the step."""
    if rule == "rejection" and draft != "recurrent":
        pytest.skip("refused: n-grams have no probabilities")
    target = cuda_target()
    made = {
        "recurrent": lambda: recurrent_drafter(target),
        "ngram": lambda: NgramDrafter(2, 1),
        "recurrent+ngram": lambda: WithNgrams(recurrent_drafter(target)),
    }
    drafter, shape = made[draft](), Shape(width=3, length=3)
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1)

    def rules(shape):
        return make_rule(RuleConfig(name=rule), shape, target.vocab_size, target.dtype)

    batch = Batch(target, drafter, rows=2, context=99, shapes=[shape], rules=rules, runtime="eager")
    requests = [Request(prompt=p, seed=1, max_new_tokens=40, sampling=params) for p in PROMPTS[:2]]
    batch.read_all([batch.open(r) for r in requests])
    for _ in range(2):  # the first step of a row drafts nothing
        batch.step(shape)
    state, sampling = batch.state, batch.sampling(2)
    rows = state.view(2, drafts=True, counted=True)
    seen = StepDrafter(drafter, rows, state.history, follows=state.guesses[:2], guesses=True)
    with torch.no_grad():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                new, _, _ = step(rows, state.cache, sampling, rules(shape), seen, target)
                assign(rows, new)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(rows.lengths.min()) > len(PROMPTS[1]) + 3


def test_rows_join_and_leave_while_steps_are_under_way():
    """A wait here would cost every text one step, and a server's other rows too."""
    batch = Batch(cuda_target(), NoDrafter(), rows=2, context=99, shapes=[], runtime="graphs")
    sampling = SamplingParams(temperature=0.5)
    requests = [Request(prompt=p, seed=1, max_new_tokens=40, sampling=sampling) for p in PROMPTS[:3]]
    rows = [batch.open(r) for r in requests[:2]]
    batch.read_all(rows)
    for _ in range(2):
        batch.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.close(rows[0])
        batch.open(requests[2])
        batch.sampling(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.drain()


def test_a_step_never_waits_for_the_host_twin():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bulk_texts_are_the_cpus(kind):
    """Recorded as a graph, or not where a model waits for the host (experts)."""
    kinds = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.7, 0.0, 1.0)]
    requests = [
        Request(prompt=p, seed=i, max_new_tokens=40, sampling=kind, eos=(11, 23))
        for i, (p, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    cpu = write_texts(load_target(make_model(kind)), requests, rows=2)
    assert write_texts(cuda_target(kind), requests, rows=2) == cpu


def test_training_resumes_bit_for_bit(tmp_path):
    target = load_target(copy.deepcopy(make_model(dtype=torch.float32)).cuda())
    texts = make_texts(target)
    config = replace(CONFIG, states="recompute")  # states in memory were computed in other batches
    train(target, texts, tmp_path / "whole", options=OPTIONS, config=config)
    train(target, texts, tmp_path / "parts", options=OPTIONS, config=config)
    last = "checkpoints/update-00000012"
    shutil.rmtree(tmp_path / "parts" / last)
    train(target, texts, tmp_path / "parts", options=OPTIONS, config=config)
    whole, parts = ((tmp_path / n / last / "state.safetensors").read_bytes() for n in ("whole", "parts"))
    assert whole == parts


@pytest.mark.parametrize("runtime", ["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["own attention", "tree kernel"])
def test_rows_that_join_and_leave_a_recorded_batch_write_what_each_writes_alone(runtime, dtype):
    target = load_target(copy.deepcopy(make_model("llama", dtype)).cuda())
    chance = random.Random(3)
    every = requests(target, 20, chance)
    drafter = recurrent_drafter(target, memory_heads=2, memory_size=8)
    batch = Batch(target, drafter, rows=6, context=90, kept=3, shapes=BATCH_SHAPES, endings=2, runtime=runtime)
    texts = serve(batch, every, chance)
    eager = Engine(target, NoDrafter(), runtime="eager")
    assert texts == {i: eager.complete([r])[0].tokens for i, r in enumerate(every)}
    assert batch.recorded == (runtime != "eager")
    assert all(s is not None for s in batch.steps.steps.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["own attention", "tree kernel"])
@pytest.mark.parametrize("runtime", ["graphs", "compiled"])
def test_steps_with_a_grammar_are_recorded(dtype, runtime, monkeypatch):
    """Beside a row without a grammar; the texts are those of eager plain decoding."""
    pytest.importorskip("llguidance")
    small = byte_target(dtype=dtype)
    target = load_target(copy.deepcopy(small.model).cuda(), tokenizer=small.tokenizer)
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}}, "required": ["name"]}
    pattern = Grammar.regex("[a-f]{9,12}yes")
    engine = Engine(target, WithNgrams(recurrent_drafter(target)), shape=Shape(width=3, length=4), runtime=runtime)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 30, "temperature": temperature, "seed": 5}
        asked = [engine.requests(["name"], grammar=g, **options)[0] for g in (schema, None, pattern)]
        want = [c.tokens for c in Engine(small, NoDrafter()).complete(asked)]
        with monkeypatch.context() as patch:
            patch.setattr(EagerSteps, "launch", lambda *_: pytest.fail("a step ran eagerly"))
            for contender in (engine, engine.plain()):
                assert [c.tokens for c in contender.complete(asked)] == want
    (batch,) = engine._idle
    assert any(kind.guided for kind in batch.steps.steps)


@pytest.mark.parametrize("runtime", ["eager", "graphs", "compiled"])
def test_steps_that_draft_or_not_at_random_write_the_plain_text(runtime, monkeypatch):
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)).cuda())
    drafter = WithNgrams(recurrent_drafter(target, memory_heads=2, memory_size=8))
    engine = Engine(target, drafter, shape=SWITCHING_SHAPE, adapts=True, runtime=runtime)
    draw, chosen = random.Random(4), []

    def choose(self, load, drafts, ready):
        chosen.append(draw.choice([draw.choice(drafts), Action(None, 0, load.tokens)]))
        return chosen[-1]

    monkeypatch.setattr(LatePlanner, "choose", choose)
    for temperature in (0.0, 1.0):
        assert texts_by(engine, temperature) == texts_by(engine.plain(), temperature)
    drafted = [action for action in chosen if action.shape is not None]
    assert min(len(drafted), len(chosen) - len(drafted)) > 20
    assert runtime == "eager" or len({action.nodes for action in drafted}) > 2


@pytest.mark.parametrize("runtime", ["graphs", "compiled"])
def test_a_drafter_that_is_nearly_always_wrong_is_hardly_used(runtime):
    target = load_target(copy.deepcopy(make_model("llama", torch.float32)).cuda())
    guesses = recurrent_drafter(target, draft_vocab_size=4)  # four tokens that the text hardly contains
    engine = Engine(target, guesses, shape=Shape(width=4, length=12), adapts=True, runtime=runtime)
    assert Engine(target, engine.drafter, shape="2x2", runtime=runtime).planner is None, "a given shape is kept"
    want = engine.plain().generate(PROMPTS[0], max_new_tokens=80).tokens
    every = [engine.generate(PROMPTS[0], max_new_tokens=80) for _ in range(5)]
    assert all(c.tokens == want for c in every)
    assert every[0].stats.plain_steps < every[0].stats.steps, "the drafter is tried"
    later = [c.stats for c in every[1:]]
    plain, steps = sum(s.plain_steps for s in later), sum(s.steps for s in later)
    load, planner = Load(1, slots=100), engine.planner
    seconds = [planner.seconds(action, load) for action in (Action(engine.shape, 47, 64), Action(None, 0, 1))]
    assert plain > 0.7 * steps, f"{plain} of {steps} steps were plain; steps take {seconds} s"
    (batch,) = engine._idle
    assert {kind.shape is None for kind in batch.steps.steps} == {True, False}
