"""Speculative text = plain text, token for token, for every family; and mlx-lm's own greedy text is the plain text."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from zoo import FAMILIES, PROMPTS, OracleDrafter, make_model, recurrent_drafter

from redrafter_mlx.api import Engine
from redrafter_mlx.config import Shape
from redrafter_mlx.drafter import NgramDrafter, NoDrafter
from redrafter_mlx.selfcheck import check
from redrafter_mlx.target import Target

SHAPE = Shape(width=3, length=4, nodes=9)
TOKENS = 16


def texts(engine, prompts=PROMPTS, batch_size=1, **options):
    return [c.tokens for c in engine.generate(prompts, max_new_tokens=TOKENS, batch_size=batch_size, **options)]


def all_equal(target, shape=SHAPE, **options):
    """Every drafter, one row at a time and as a ragged batch, against plain decoding; returns the plain texts."""
    plain = texts(Engine(target, NoDrafter()), **options)
    assert texts(Engine(target, NoDrafter()), batch_size=5, **options) == plain
    oracle = Engine(target, OracleDrafter(PROMPTS, plain, 0.7), shape)
    for batch_size in (1, 5):
        done = oracle.generate(PROMPTS, max_new_tokens=TOKENS, batch_size=batch_size, **options)
        assert [c.tokens for c in done] == plain
        assert sum(c.stats.accepted for c in done) > 20, "guesses were accepted"
    for drafter in (recurrent_drafter(target), NgramDrafter()):
        assert texts(Engine(target, drafter, shape), batch_size=5, **options) == plain
    alone = {**options, "seed": options["seed"][0]} if isinstance(options.get("seed"), list) else options
    assert texts(Engine(target, recurrent_drafter(target), shape), PROMPTS[:1], **alone) == plain[:1]
    return plain


SHORT = (("llama", 1.0), ("gemma3", 0.0), ("mistral-window", 0.0), ("mixtral", 1.0), ("phi3", 0.0))
"""What the short form of the tests keeps of the matrix."""
MATRIX = [
    pytest.param(family, temperature, marks=() if (family, temperature) in SHORT else pytest.mark.long)
    for family in FAMILIES
    for temperature in (0.0, 1.0)
]


@pytest.mark.parametrize(("family", "temperature"), MATRIX)
def test_every_family(family, temperature):
    model = make_model(family)
    target = Target(model)
    check(target)
    plain = all_equal(target, temperature=temperature, seed=[11, 12, 13, 14, 15])
    target.release()
    if temperature == 0:
        for prompt, text in zip(PROMPTS[:2], plain, strict=False):
            own = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)]
            assert own == text, "mlx-lm's own greedy text"
    assert len({tuple(t) for t in plain}) == len(PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_sampling_options(options):
    target = Target(make_model())
    plain = all_equal(target, seed=5, **options)
    assert plain != texts(Engine(target, NoDrafter()), seed=5, temperature=options["temperature"]), (
        "they change the text"
    )
    target.release()


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.long)])
def test_quantised_models(bits):
    """mlx-lm's own quantisation; the drafter's head uses the quantised rows."""
    model = make_model(fresh=True)
    nn.quantize(model, group_size=32, bits=bits)
    target = Target(model)
    check(target)
    assert target.quantised
    all_equal(target, temperature=0.0)
    all_equal(target, temperature=1.0, seed=2)
    assert target.identity()["signs"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(dtype):
    """Texts may part where two tokens' scores are closer than rounding: most of them are equal."""
    model = make_model(fresh=True)
    model.set_dtype(dtype)
    target = Target(model)
    check(target)
    plain = texts(Engine(target, NoDrafter()))
    fast = texts(Engine(target, OracleDrafter(PROMPTS, plain, 0.7), SHAPE))
    assert sum(a == b for a, b in zip(plain, fast, strict=True)) >= 3
    assert len(texts(Engine(target, recurrent_drafter(target), SHAPE))) == len(PROMPTS)


def test_a_seed_gives_the_same_text_alone_and_in_any_batch():
    target = Target(make_model())
    engine = Engine(target, recurrent_drafter(target), SHAPE)
    alone = [engine.generate(p, max_new_tokens=9, temperature=1.0, seed=s).tokens for s, p in enumerate(PROMPTS)]
    for size in (2, 3, 5):
        together = engine.generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=range(5), batch_size=size)
        assert [c.tokens for c in together] == alone
    other = engine.generate(PROMPTS[0], max_new_tokens=9, temperature=1.0, seed=99)
    assert other.tokens != alone[0]
    target.release()
