"""The drafter that comes with the package: it fits the default model, guesses well, changes no token."""

import copy
import json

import pytest
import torch

import redrafter
from redrafter.drafters import NgramDrafter, RecurrentDrafter, WithNgrams, checkpoint, shipped
from redrafter.drafters.load import CPU_TOKENS
from redrafter.engine.resolve import resolve_drafter
from redrafter.targets import Target, load_target
from tests.helpers.zoo import make_model

QUESTIONS = ["Why is the sky blue?", "Write a short story about a lighthouse keeper."]


@pytest.fixture(scope="module")
def engine() -> redrafter.Engine:
    return redrafter.load(shape=redrafter.Shape(width=3, length=3, nodes=5))


def test_auto_finds_it(engine: redrafter.Engine) -> None:
    assert isinstance(engine.drafter, WithNgrams)
    assert isinstance(engine.drafter.inner, RecurrentDrafter)
    assert isinstance(resolve_drafter("recurrent", engine.target), RecurrentDrafter)
    assert isinstance(resolve_drafter("auto", Target(make_model())), NgramDrafter)
    bare = load_target(engine.target.model)  # as custom_generate has it: no tokenizer
    assert shipped.find(bare) == shipped.find(engine.target)


def test_it_guesses_and_changes_nothing(engine: redrafter.Engine) -> None:
    prompts = [[{"role": "user", "content": q}] for q in QUESTIONS]
    for temperature in (0.0, 1.0):
        done = engine.generate(prompts, max_new_tokens=24, temperature=temperature, seed=3)
        plain = engine.plain().generate(prompts, max_new_tokens=24, temperature=temperature, seed=3)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        assert sum(c.stats.tokens - 1 for c in done) / sum(c.stats.steps for c in done) > 1.7


def test_what_lies_in_the_package(engine: redrafter.Engine) -> None:
    (folder,) = [p for p in shipped.FOLDER.iterdir() if p.is_dir()]
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 20e6
    card = (folder / "README.md").read_text()
    for word in ("license: apache-2.0", "SmolLM2-135M-Instruct", "redrafter train", "commit"):
        assert word in card
    config = json.loads((folder / "config.json").read_text())
    assert config["target"] == checkpoint.identity(engine.target)


def test_on_a_cpu_it_guesses_among_the_most_frequent_tokens(engine: redrafter.Engine) -> None:
    drafter = resolve_drafter("recurrent", engine.target)
    assert isinstance(drafter, RecurrentDrafter)
    folder = shipped.find(engine.target)
    assert folder is not None
    whole, _ = checkpoint.read(folder)
    assert (len(whole.token_ids), len(drafter.net.token_ids)) == (32768, CPU_TOKENS)
    assert len(drafter.vocabulary) == drafter.net.config.guessable == CPU_TOKENS
    assert torch.equal(drafter.net.token_ids, whole.token_ids[:CPU_TOKENS])
    assert drafter.net.tied


def test_int8_storage_is_a_quarter_and_nearly_the_same(engine: redrafter.Engine, tmp_path) -> None:
    drafter = resolve_drafter("recurrent", engine.target)
    assert isinstance(drafter, RecurrentDrafter)
    net = drafter.net
    drafter.save(tmp_path / "exact", engine.target)
    drafter.save(tmp_path / "int8", engine.target, storage="int8")
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("exact", "int8")]
    assert sizes[1] < 0.26 * sizes[0]
    back, _ = checkpoint.read(tmp_path / "int8")
    for a, b in zip(net.parameters(), back.parameters(), strict=True):
        assert torch.allclose(a, b, atol=float(a.detach().abs().max()) / 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_recognised_in_every_dtype(dtype: torch.dtype) -> None:
    model = copy.deepcopy(make_model())
    with torch.no_grad():  # numbers that fp16 rounds up to the middle between two of bf16
        model.get_output_embeddings().weight.view(-1)[::7] = 1 + 2**-8 - 2**-12
    of = checkpoint.identity(Target(model))
    rounded = checkpoint.identity(Target(model.to(dtype)))
    assert checkpoint.same_weights(of, rounded)
    assert (of["weights"] == rounded["weights"]) == (dtype == torch.bfloat16), "twin: a hash of rounded weights"
    assert not checkpoint.same_weights(of | {"signs": ""}, rounded)
    old = {"weights": of["weights"]}
    assert checkpoint.same_weights(old, of), "an identity from before there were signs"
