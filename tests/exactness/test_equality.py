"""The promise: speculative text == plain text, token for token, in fp64, without exception."""

import itertools

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.targets import load_target
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, OracleDrafter, make_model, recurrent_drafter

NEW = 20
SHAPES = [
    Shape(width=w, length=n, nodes=nodes)
    for w, n in itertools.product((1, 3, 8), (1, 4))
    for nodes in sorted({max(1, w * n - 2), w * n})
]
HOT = {"temperature": 1.0, "seed": 5}
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def texts(engine: Engine, **options):
    return [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=NEW, **options)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_plain_greedy_is_transformers_generate(kind):
    model = make_model(kind)
    ours = texts(Engine(load_target(model), NoDrafter()))
    for prompt, own in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert own == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("options", [{}, HOT, HOT | PENALISED], ids=["greedy", "hot", "penalised"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_speculative_is_plain(kind, options):
    check(kind, options, SHAPES[1::4])


@pytest.mark.parametrize(
    "kind", [k if k in ("llama", "gemma3") else pytest.param(k, marks=pytest.mark.slow) for k in ARCHITECTURES]
)
def test_every_shape(kind):
    """Greedily, since a shape knows no options."""
    check(kind, {}, SHAPES)


def check(kind, options, shapes):
    target = load_target(make_model(kind))
    plain = texts(Engine(target, NoDrafter()), **options)
    assert len({tuple(t) for t in plain}) == len(PROMPTS), "the texts must differ for the test to mean anything"
    drafter = recurrent_drafter(target)
    for shape in shapes:
        assert texts(Engine(target, drafter, shape=shape), **options) == plain, shape


@pytest.mark.parametrize("options", [{}, HOT | PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "qwen2-mixed"])
def test_a_drafter_with_a_memory(kind, options):
    """Its state is carried over accepted tokens, and rows leave the batch at different times."""
    target = load_target(make_model(kind))
    plain = texts(Engine(target, NoDrafter()), **options)
    drafter = recurrent_drafter(
        target, cell="gated", first_state="context", normed=True, memory_heads=2, memory_size=8, layers=(0, 1, -1),
        context_size=3 * target.hidden_size, head="tied", draft_vocab_size=30,
    )  # fmt: skip
    for shape in (Shape(width=1, length=3), Shape(width=5, length=4, nodes=12)):
        engine = Engine(target, drafter, shape=shape)
        assert texts(engine, **options) == plain
    for prompt, text in zip(PROMPTS[:3], plain, strict=False):
        assert engine.generate(prompt, max_new_tokens=NEW, **options).tokens == text


@pytest.mark.parametrize("options", [{}, HOT | PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_drafter_always_never_sometimes_right(kind, options):
    target = load_target(make_model(kind))
    plain = texts(Engine(target, NoDrafter()), **options)
    shape = Shape(width=3, length=4, nodes=10)
    speeds = []
    for skill in (1.0, 0.6, 0.0):
        engine = Engine(target, OracleDrafter(PROMPTS, plain, skill), shape=shape)
        done = engine.generate(PROMPTS, max_new_tokens=NEW, **options)
        assert [c.tokens for c in done] == plain
        speeds.append(sum(c.stats.tokens_per_step for c in done) / len(done))
    # 19 tokens after the first: four steps of 5, 5, 5, 4
    assert speeds[0] == pytest.approx(19 / 4)
    assert speeds[0] > speeds[1] > speeds[2]
    assert speeds[2] == pytest.approx(1.0, abs=0.2)  # a noise candidate may hit by chance


@pytest.mark.parametrize("make", [lambda t: ModelDrafter(t, t), lambda t: NgramDrafter(2, 1)], ids=["model", "ngram"])
@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "gpt2"])
def test_other_drafters(kind, options, make):
    target = load_target(make_model(kind))
    plain = texts(Engine(target, NoDrafter()), **options)
    for shape in (Shape(width=1, length=4), Shape(width=3, length=3, nodes=7)):
        assert texts(Engine(target, make(target), shape=shape), **options) == plain


def test_the_model_as_its_own_drafter_is_nearly_always_right():
    target = load_target(make_model())
    engine = Engine(target, ModelDrafter(target, target), shape=Shape(width=1, length=4))
    for done in engine.generate(PROMPTS, max_new_tokens=NEW, **HOT):  # a chain under the shared noise: never wrong
        assert done.stats.tokens_per_step == pytest.approx(19 / 4)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
def test_filters(filters):
    target = load_target(make_model())
    options = HOT | filters
    plain = texts(Engine(target, NoDrafter()), **options)
    assert plain != texts(Engine(target, NoDrafter()), **HOT), "the filter must matter"
    assert texts(Engine(target, recurrent_drafter(target), shape=Shape(width=4, length=3)), **options) == plain


VARIANTS = [
    {"first_state": "zero"},
    {"first_state": "context"},
    {"cell": "none"},
    {"cell": "none", "first_state": "zero"},
    {"exit_size": 64},  # no input projection
    {"blocks": 0},
    {"head": "tied"},
    {"draft_vocab_size": 12},
    {"head": "tied", "draft_vocab_size": 12},
    {"first_state": "zero", "state_size": 20},
    {"layers": (0, 1, -1), "context_size": 96},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_recurrent_variants(variant):
    target = load_target(make_model())
    drafter = recurrent_drafter(target, **variant)
    for options in ({}, HOT):
        plain = texts(Engine(target, NoDrafter()), **options)
        engine = Engine(target, drafter, shape=Shape(width=5, length=3, nodes=9))
        assert texts(engine, **options) == plain


def test_place_in_the_batch_never_matters():
    target = load_target(make_model())
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3))
    together = texts(engine, **HOT)
    for prompt, own in zip(PROMPTS, together, strict=True):
        assert engine.generate(prompt, max_new_tokens=NEW, **HOT).tokens == own
    backwards = engine.generate(PROMPTS[::-1], max_new_tokens=NEW, **HOT)
    assert [c.tokens for c in backwards][::-1] == together


def test_rows_of_one_batch_may_sample_differently():
    target = load_target(make_model())
    for engine in (Engine(target, NoDrafter()), Engine(target, recurrent_drafter(target))):
        greedy = engine.requests([PROMPTS[0]], max_new_tokens=NEW, seed=1)
        hot = engine.requests([PROMPTS[0]], max_new_tokens=NEW, seed=1, temperature=1.0, top_p=0.9)
        penalised = engine.requests([PROMPTS[2]], max_new_tokens=7, seed=2, temperature=1.5, presence_penalty=1.0)
        mixed = [c.tokens for c in engine.complete(greedy + hot + penalised)]
        assert mixed == [engine.complete([r])[0].tokens for r in greedy + hot + penalised]


@pytest.mark.parametrize("head", ["own", "tied"])
@pytest.mark.parametrize("cell", ["rnn", "gated", "none"])
def test_folded_products_guess_the_same(cell, head):
    """What a GPU decodes with: products of weights made once. Same guesses, so the same steps."""
    target = load_target(make_model("llama"))
    changes = {"cell": cell, "first_state": "zero", "head": head, "draft_vocab_size": 30, "exit_size": 12}
    plain, folded = (recurrent_drafter(target, **changes) for _ in range(2))
    folded._precompute()
    assert folded.vocabulary.shape[1] == 12 or head == "own"
    shape = Shape(width=3, length=4, nodes=9)
    a, b = (Engine(target, d, shape=shape).generate(PROMPTS, max_new_tokens=20) for d in (plain, folded))
    assert [c.stats.accepted_per_step for c in a] == [c.stats.accepted_per_step for c in b]
