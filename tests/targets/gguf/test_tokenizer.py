"""Tokenizers of GGUF files: texts begin with BOS as the file says, and a kept conversion gives the same ids."""

import pytest
from transformers import AutoTokenizer

from redrafter.targets.gguf import tokenizer as module
from redrafter.targets.gguf.file import GGUFFile
from tests.targets.gguf.test_blocks import write

TOKENS = [
    "<unk>",
    "<begin of: text>",
    "</s>",
    *(f"<0x{i:02X}>" for i in range(256)),
    "\u2581",
    "a",
    "b",
    "\u2581a",
    "ab",
    "\u2581ab",
]
BOS = 1


def words(**changes):
    """The metadata of a tokenizer."""
    metadata = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [-float(i) for i in range(len(TOKENS))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        **{"bos_token_id": BOS, "eos_token_id": 2, "unknown_token_id": 0},
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}


def make(path, architecture="llama", **changes):
    return GGUFFile(write(path, {}, words(**changes), architecture))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_text_begins_with_bos_as_the_file_says(tmp_path, architecture):
    for changes, wanted in (({}, True), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)):
        file = make(tmp_path / "x.gguf", architecture, **changes)
        made, again = module.tokenizer_of(file), module.tokenizer_of(file)
        for tokenizer in (made, again):
            ids = tokenizer("ab")["input_ids"]
            assert ids.count(BOS) == wanted == (ids[0] == BOS), changes
            assert BOS not in tokenizer("ab", add_special_tokens=False)["input_ids"]
        auto = AutoTokenizer.from_pretrained(module._kept(file))
        assert (type(again), again.init_kwargs.keys()) == (type(auto), auto.init_kwargs.keys())


def test_kept_conversions_are_apart(tmp_path, monkeypatch):
    llama, gemma = (make(tmp_path / f"{kind}.gguf", kind) for kind in ("llama", "gemma3"))
    folders = {module._kept(llama), module._kept(gemma)}
    monkeypatch.setattr(module, "FORMAT", 1)
    assert len({*folders, module._kept(llama)}) == 3
