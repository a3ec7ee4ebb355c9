"""A real file in Q4_K_M, with Gemma 3's SentencePiece vocabulary: `make test-gguf` downloads it."""

import os

import redrafter

FILE = os.environ.get("REDRAFTER_GEMMA", "")  # conftest.py collects this module only where it is set


def test_gemma_3():
    engine = redrafter.load(FILE, device="cpu")
    assert engine.target.forward_kind == "packed, int16 activations"
    tokenizer, prompt = engine.target.tokenizer, "The capital of France is"
    ids = tokenizer(prompt)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "The", "▁capital", "▁of", "▁France", "▁is"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    prompts = [prompt, "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "def fibonacci(n):\n"]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        texts = [side.generate(prompts, max_new_tokens=32, **options) for side in (engine, engine.plain())]
        assert [t.tokens for t in texts[0]] == [t.tokens for t in texts[1]]
        assert sum(t.stats.steps for t in texts[0]) < sum(t.stats.steps for t in texts[1]), "no guess was accepted"
    assert "Paris" in engine.generate("The capital of France is called", max_new_tokens=16, temperature=0).text
