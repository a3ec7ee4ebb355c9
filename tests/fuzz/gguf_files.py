"""Damaged GGUF files, loaded and run for one pass: run by test_gguf_files.py."""

import contextlib
import logging
import random
import sys
import tempfile
from pathlib import Path

import torch

from redrafter.targets import load_target
from tests.fuzz.cases import try_all
from tests.fuzz.drafter_folders import flipped
from tests.targets.gguf.test_model import TOKENS, logits, make_file

MODELS = {"llama": ("Q4_1", "Q4_K"), "qwen2": ("F16", "Q5_0"), "qwen3": ("Q8_0", "BF16"), "gemma3": ("Q6_K", "Q4_0")}
"""Architectures, and the types of the weights of their files."""
NUMBERS = (0, 1, 2, 3, 7, 8, 12, 30, 31, 33, 64, 255, *(2**n - k for n in (16, 31, 32, 40, 63, 64) for k in (0, 1)))


def damaged(data: bytes, header: int, rng: random.Random) -> bytes:
    """A file with a few changes, most of them in its header, or with many in its weights."""
    how = rng.random()
    if how < 0.3:
        return flipped(data, rng, header if rng.random() < 0.85 else len(data))
    made = bytearray(data)
    if how < 0.5:
        for _ in range(500):
            made[rng.randrange(header, len(made))] = rng.choice((0, 127, 252, 255, rng.randrange(256)))
        return bytes(made)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(4, header), rng.choice((1, 4, 8))
        made[at : at + size] = (rng.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(made)


def main(count: str) -> None:
    logging.disable()
    ids = torch.arange(3)[None]
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        path, files = Path(scratch, "x.gguf"), []
        for architecture, types in MODELS.items():
            for kind in types:
                whole = make_file(path, architecture, kind).read_bytes()
                files.append((architecture, whole, whole.index(b"output_norm.weight") + 50))
                logits(load_target(path, device="cpu"), ids)

        def case(rng: random.Random) -> str:
            architecture, whole, header = rng.choice(files)
            path.write_bytes(damaged(whole, header, rng))
            assert logits(load_target(path, device="cpu"), ids).shape == (1, 3, TOKENS)
            return architecture

        with contextlib.redirect_stdout(sys.__stdout__):
            try_all(int(count), case)
