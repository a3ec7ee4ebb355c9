"""All else works with a model that has a recurrent state: training, data, the server, transformers, grammars."""

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter import Engine, Grammar, Shape, custom_generate
from redrafter.config import Gamma
from redrafter.core.cache import KVCache
from redrafter.drafters import ModelDrafter, NoDrafter, RecurrentDrafter
from redrafter.errors import DrafterMismatch, UnsupportedTarget
from redrafter.targets import Target, load_target
from redrafter.train.dataset import read_texts
from redrafter.train.distill import distill
from redrafter.train.setup import make_net
from redrafter.train.trainer import train
from redrafter.tuning.simulate import simulate
from tests.helpers.bytes import VOCAB as BYTES
from tests.helpers.bytes import byte_tokenizer
from tests.helpers.hybrids import CONFIGS, hybrid, hybrid_model
from tests.helpers.letters import END, FILE, SMALL, plain, rows, tokenizer
from tests.helpers.serving import NAME, make_served, running
from tests.helpers.toys import CONFIG, OPTIONS, make_texts
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter

KIND = "qwen3.5"


@pytest.fixture(scope="module")
def letters() -> Target:
    return load_target(hybrid_model(KIND, eos_token_id=END), tokenizer=tokenizer())


@pytest.mark.parametrize(
    "kind", [k if k in (KIND, "mamba2", "lfm2") else pytest.param(k, marks=pytest.mark.slow) for k in CONFIGS]
)
@torch.no_grad()
def test_hidden_states_of_whole_texts_are_those_of_decoding(kind: str) -> None:
    """Training reads texts padded on the right, without a cache."""
    target, generator = hybrid(kind), torch.Generator().manual_seed(1)
    tokens, lengths = torch.randint(VOCAB, (2, 20), generator=generator), [20, 13]
    tokens[1, 13:] = 0
    whole = target.states(tokens, (0, -1))
    cache = KVCache(slots=20)
    _, read = target.prefill(tokens, lengths, cache, (0, -1))
    for row, length in enumerate(lengths):
        assert torch.allclose(whole[row, :length], read[row, :length], atol=1e-5)
    alone = target.states(tokens[1:, :13], (0, -1))
    assert torch.allclose(whole[1, :13], alone[0], atol=1e-5), "padding changes nothing"


def test_a_drafter_learns_and_the_texts_stay_the_same(tmp_path: Path) -> None:
    target = load_target(hybrid_model(KIND, torch.float32))
    texts = make_texts(target, count=40)
    shape = Shape(width=4, length=3)
    train(target, texts, tmp_path, options=OPTIONS, config=replace(CONFIG, updates=30, evaluate_every=15))
    before = simulate(target, RecurrentDrafter(make_net(target, texts, OPTIONS, 0), target), texts, shape)
    drafter = RecurrentDrafter.load(tmp_path, target)
    assert simulate(target, drafter, texts, shape).tokens_per_step > before.tokens_per_step + 0.1
    engine = Engine(target, drafter, shape=shape)
    slow = engine.plain().generate(PROMPTS, max_new_tokens=16)
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=16)] == [c.tokens for c in slow]


def test_training_data_is_the_targets_own(letters: Target, tmp_path: Path) -> None:
    distill(letters, tmp_path, replace(SMALL, texts=4), prompts=FILE)
    data = read_texts(tmp_path, letters)
    assert rows(data) == plain(letters, data)


def test_rollouts_are_refused(letters: Target, tmp_path: Path) -> None:
    config = replace(SMALL, local=2)
    with pytest.raises(UnsupportedTarget, match=r"keeps a recurrent state: .* leave out --local"):
        distill(letters, tmp_path, config, prompts=FILE)


def test_it_is_no_draft_model() -> None:
    with pytest.raises(DrafterMismatch, match="keeps a recurrent state, and drafts go back in a text"):
        ModelDrafter(hybrid(KIND), load_target(make_model()), gamma=Gamma())


@pytest.mark.parametrize("kind", [KIND, "nemotron-h"])
def test_generate_of_transformers(kind: str) -> None:
    model = hybrid_model(kind)
    width = max(map(len, PROMPTS))
    padded = {
        "inputs": torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
        "do_sample": False,
        "max_new_tokens": 10,
        "pad_token_id": 0,
    }
    drafter = recurrent_drafter(load_target(model))
    fast = model.generate(**padded, custom_generate=custom_generate, drafter=drafter, shape=Shape(width=3, length=3))
    assert torch.equal(fast, model.generate(**padded))


def test_grammars() -> None:
    sizes = {"vocab_size": BYTES, "eos_token_id": 0, "max_position_embeddings": 512}
    target = load_target(hybrid_model(KIND, **sizes), tokenizer=byte_tokenizer())
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3))
    options: dict[str, Any] = {"max_new_tokens": 20, "grammar": Grammar.regex("(yes|no)+, [a-c]{2,9}"), "seed": 3}
    for temperature in (0.0, 1.0):
        fast, slow = (e.generate(["a", "bcd"], temperature=temperature, **options) for e in (engine, engine.plain()))
        assert [c.tokens for c in fast] == [c.tokens for c in slow]
        assert any(c.text.startswith(("yes", "no")) for c in fast)


def test_the_server_answers_and_tells_the_memory_of_copies(letters: Target) -> None:
    served = make_served(letters)
    wanted = Engine(letters, NoDrafter())

    def answer(url: str, prompt: str) -> tuple[str, int]:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        post = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        done = json.loads(urllib.request.urlopen(post).read())
        return done["choices"][0]["text"], done["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(served) as url:
        first = "abcdefghij" * 7
        for prompt, reused in ((first, 0), (first + "aab", 64)):
            text, cached = answer(url, prompt)
            assert text == wanted.generate(prompt, max_new_tokens=8).text
            assert cached == reused
        lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("redrafter_state_copies_bytes ")]
    assert int(value) == letters.state_of_row().nbytes > 0, "of the first prompt"
