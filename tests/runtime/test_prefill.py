"""Prompts of a running batch, read by recorded passes; and what is recorded before it is needed."""

import random

import pytest
import torch

from redrafter import Engine
from redrafter.config import SamplingParams
from redrafter.drafters import NoDrafter
from redrafter.runtime.prefill import PromptReader
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.tuning.batch_cost import warm_up
from tests.helpers.zoo import VOCAB, make_model
from tests.runtime.test_batch import SHAPES, alone, make_batch, requests, serve, stepped


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
        batch = make_batch(single, recorded=True, runtime="graphs")
        assert batch.reader is not None
        row = batch.open(Request(prompt=prompt, seed=0, max_new_tokens=9))
        while (written := batch.read(row, most)) is None:
            pass
        tokens = list(written.tokens)
        while not written.done:
            written = stepped(batch, True, SHAPES[0])
            tokens += written.tokens
        assert tokens == expected.tokens
        # Room for 90 tokens and a tree: 64 fit behind the first 33, 128 nowhere.
        assert set(batch.reader.pieces) == {1: {16}, 7: {16}, 33: {64, 16}, 80: set()}[most]
        assert not batch.reader.failed


def test_a_wrong_place_is_noticed(single: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: prompts read into the next row's place."""
    read = PromptReader.read
    monkeypatch.setattr(
        PromptReader, "read", lambda self, place, tokens, begin: read(self, (place + 1) % 9, tokens, begin)
    )
    chance = random.Random(0)
    every = requests(single, 8, chance)
    assert serve(make_batch(single, recorded=True, runtime="graphs"), every, chance) != dict(
        enumerate(alone(single, every))
    )


def test_what_is_prepared_is_not_recorded_when_it_is_needed(single: Target) -> None:
    batch = make_batch(single, recorded=True, runtime="graphs")
    warm_up(batch, lambda rows: [*SHAPES, None])
    assert batch.free == batch.rows
    assert batch.reader is not None
    before = set(batch.executor.steps), set(batch.reader.pieces)
    assert before[1] == {16, 32, 64}
    chance = random.Random(8)
    every = requests(single, 24, chance)
    assert serve(batch, every, chance) == dict(enumerate(alone(single, every)))
    # A scheduler guesses for no plain row. Watched rows are rare: their steps are recorded at first use.
    made = {key for key in batch.executor.steps if (key[2] or key[3] is None) and not key[-1]}
    assert (made, set(batch.reader.pieces)) == before
    small = make_batch(single, recorded=True, runtime="graphs")
    warm_up(small, lambda rows: [*SHAPES, None], [SamplingParams()])
    assert set(small.executor.steps) < before[0], "greedy rows alone need fewer"
