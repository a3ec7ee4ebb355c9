"""The same model, drafter, shape and seed: the same text in the same steps in MLX and in redrafter's torch engine."""

import json
import shutil

import pytest

import redrafter
import redrafter_mlx
from benchmarks.smoke import TinyFiles

PROMPTS = ["Why is the sky blue?", "aaaaabaaaaab", "x"]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}],
    ids=str,
)
@pytest.mark.parametrize("ngrams", [True, False])
def test_texts_and_steps(options, ngrams):
    tiny = TinyFiles.shared()
    drafter = f"{tiny.drafter}+ngram" if ngrams else str(tiny.drafter)
    shape = redrafter.Shape(width=2, length=3, nodes=4)
    with redrafter.load(str(tiny.model), drafter, device="cpu", dtype="fp32", shape=shape) as oracle:
        expected = oracle.generate(PROMPTS, max_new_tokens=20, seed=[1, 2, 3], **options)
    engine, _ = redrafter_mlx.load(str(tiny.model), drafter=drafter, shape="2x3:4")
    found = engine.generate(PROMPTS, max_new_tokens=20, seed=[1, 2, 3], **options)
    for own, other in zip(found, expected, strict=True):
        assert own.tokens == other.tokens
        assert own.text == other.text
        assert own.finish_reason == other.finish_reason
        assert (own.stats.steps, own.stats.accepted, own.stats.nodes) == (
            other.stats.steps,
            other.stats.accepted,
            other.stats.nodes,
        )


def test_the_rotary_base_of_transformers_5(tmp_path):
    """transformers 5 writes the base where mlx-lm's Llama does not look; with the default base the text differs."""
    tiny = TinyFiles.shared()
    folder = tmp_path / "model"
    shutil.copytree(tiny.model, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    before, _ = redrafter_mlx.load(str(folder), drafter="none")
    config["rope_parameters"]["rope_theta"] = 20.0
    (folder / "config.json").write_text(json.dumps(config))
    with redrafter.load(str(folder), "none", device="cpu", dtype="fp32") as oracle:
        expected = oracle.generate(PROMPTS[0], max_new_tokens=20, temperature=0.0).tokens
    engine, _ = redrafter_mlx.load(str(folder), drafter="none")
    assert engine.generate(PROMPTS[0], max_new_tokens=20).tokens == expected
    assert before.generate(PROMPTS[0], max_new_tokens=20).tokens != expected
