"""Prompts of a running batch, read by recorded passes; and what is recorded before it is needed."""

import random

import pytest
import torch

from redrafter import Engine
from redrafter.config import SamplingParams
from redrafter.drafters import NoDrafter
from redrafter.runtime.eager import Start
from redrafter.runtime.reader import Reader
from redrafter.targets import Target
from redrafter.tuning.batch_cost import warm_up
from tests.helpers.zoo import VOCAB, make_model
from tests.runtime.test_pool import SHAPES, alone, make_pool, requests, serve


@pytest.fixture(scope="module")
def single() -> Target:
    """In fp32, which the tree kernel knows: prompts are read by recorded passes."""
    return Target(make_model("llama", torch.float32))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma3"])
def test_recorded_passes_read_whatever_fits(kind: str) -> None:
    """Pieces of every length, filled up to the recorded ones; near the end of the context as they are."""
    single = Target(make_model(kind, torch.float32))
    prompt = [i % VOCAB for i in range(80)]
    expected = Engine(single, NoDrafter()).complete(
        Engine(single, NoDrafter()).requests([prompt], max_new_tokens=9, seed=0)
    )[0]
    for most in (1, 7, 33, 80):
        pool = make_pool(single, recorded=True, runtime="graphs")
        assert pool.reader is not None
        row = pool.open(Start(prompt, 0, 9, ()), SamplingParams())
        while (written := pool.read(row, most)) is None:
            pass
        tokens = list(written.tokens)
        while not written.done:
            pool.launch(True, SHAPES[0])
            ((_, written),) = pool.collect()
            tokens += written.tokens
        assert tokens == expected.tokens
        # Room for 90 tokens and a tree: 64 fit behind the first 33, 128 nowhere.
        assert set(pool.reader.pieces) == {1: {16}, 7: {16}, 33: {64, 16}, 80: set()}[most]
        assert not pool.reader.hopeless


def test_a_wrong_place_is_noticed(single: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: prompts read into the next row's place."""
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, place, tokens, begin: read(self, (place + 1) % 9, tokens, begin))
    chance = random.Random(0)
    every = requests(single, 20, chance)
    assert serve(make_pool(single, recorded=True, runtime="graphs"), every, chance) != dict(
        enumerate(alone(single, every))
    )


def test_what_is_prepared_is_not_recorded_when_it_is_needed(single: Target) -> None:
    pool = make_pool(single, recorded=True, runtime="graphs")
    warm_up(pool, lambda rows: [*SHAPES, None])
    assert pool.free == pool.rows
    assert pool.reader is not None
    before = set(pool.recorder.programs), set(pool.reader.pieces)
    assert before[1] == {16, 32, 64}
    chance = random.Random(8)
    every = requests(single, 24, chance)
    assert serve(pool, every, chance) == dict(enumerate(alone(single, every)))
    made = {key for key in pool.recorder.programs if key[2] or key[3] is None}  # a scheduler guesses for no plain row
    assert (made, set(pool.reader.pieces)) == before
    small = make_pool(single, recorded=True, runtime="graphs")
    warm_up(small, lambda rows: [*SHAPES, None], [SamplingParams()])
    assert set(small.recorder.programs) < before[0], "greedy rows alone need fewer"
