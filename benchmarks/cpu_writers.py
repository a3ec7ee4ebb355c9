"""Writers of benchmarks/cpu.py that run in its own process: redrafter and transformers' `generate`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import redrafter

Writer = Callable[[list[int], int], tuple[list[int], float, int]]
"""Token ids of a prompt, at most this many new tokens -> new tokens, seconds, steps."""


def ours(engine: redrafter.Engine) -> Writer:
    def write(ids: list[int], most: int) -> tuple[list[int], float, int]:
        requests = engine.requests([ids], max_new_tokens=most)
        began = time.perf_counter()
        [done] = engine.complete(requests)
        return done.tokens, time.perf_counter() - began, done.stats.steps

    return write


def transformers_generate(model_folder: Path) -> Writer:
    """The same model in transformers, its weights in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def write(ids: list[int], most: int) -> tuple[list[int], float, int]:
        given = torch.tensor([ids])
        settings: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        began = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        tokens = made[0, len(ids) :].tolist()
        return tokens, time.perf_counter() - began, len(tokens) - 1

    return write
