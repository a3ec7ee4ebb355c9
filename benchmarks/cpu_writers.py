"""Writers of benchmarks/cpu.py that run in its own process: redrafter and transformers' `generate`."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import redrafter
from redrafter.core.cache import KVCache
from redrafter.results import versions
from redrafter.targets.cpu.packed_target import PackedTarget

ROUNDED = ("int8", "int16")
"""Activations that are compared with fp32; the last is what the target had before."""
Writer = Callable[[list[int], int], tuple[list[int], float, int]]
"""Token ids of a prompt, at most this many new tokens -> new tokens, seconds, steps."""


def ours(engine: redrafter.Engine) -> Writer:
    def write(ids: list[int], most: int) -> tuple[list[int], float, int]:
        requests = engine.requests([ids], max_new_tokens=most)
        began = time.perf_counter()
        [done] = engine.complete(requests)
        return done.tokens, time.perf_counter() - began, done.stats.steps

    return write


def with_int8_activations(engine: redrafter.Engine, target: PackedTarget, adapts: bool) -> Writer:
    """An engine of its own over the same target: it learns what steps cost with int8 activations."""
    write = ours(redrafter.Engine(target, engine.drafter, shape=engine.shape, adapts=adapts))

    def written(ids: list[int], most: int) -> tuple[list[int], float, int]:
        usual = target.activations
        target.use_activations("int8")
        try:
            return write(ids, most)
        finally:
            target.use_activations(usual)

    return written


@torch.no_grad()
def compare_choices(target: PackedTarget, texts: Iterable[tuple[list[int], list[int]]], most: int) -> dict[str, Any]:
    """Greedy choices with rounded activations that differ from those with fp32 behind the same texts; all choices.

    Also the largest difference of a logit. `texts`: prompts, and what plain decoding with int16 activations wrote. No
    text is taken after `most` choices.
    """
    differ, furthest, total = dict.fromkeys(ROUNDED, 0), dict.fromkeys(ROUNDED, 0.0), 0
    for ids, text in texts:
        whole, keep = torch.tensor([ids + text[:-1]]), torch.arange(len(ids) - 1, len(ids) + len(text) - 1)
        logits = {}
        for name in ("fp32", *ROUNDED):
            target.use_activations(name)
            logits[name] = target.read(whole, 0, KVCache(slots=whole.shape[1]), (), keep)[0][0]
        assert logits["int16"].argmax(-1).tolist() == text, "plain decoding chose other tokens"
        for name in ROUNDED:
            differ[name] += int((logits[name].argmax(-1) != logits["fp32"].argmax(-1)).sum())
            furthest[name] = max(furthest[name], float((logits[name] - logits["fp32"]).abs().max()))
        total += len(keep)
        if total >= most:
            break
    return {"choices": total, "differ": differ, "furthest": furthest}


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


def kept(write: Writer, file: Path, about: str) -> Writer:
    """The texts of `write`, kept in a file and written only once. The time of a kept text is 0.

    `about` names the model. A file of another model, or of other versions of torch or transformers, is refused: its
    texts may differ.
    """
    setting = {"model": about} | {name: versions()[name] for name in ("torch", "transformers")}
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"setting": setting, "texts": []}
    if found["setting"] != setting:
        sys.exit(f"{file} holds texts of {found['setting']}, not of {setting}: give another file")
    known: dict[tuple[int, ...], list[int]] = {(t["most"], *t["prompt"]): t["tokens"] for t in found["texts"]}

    def write_or_find(ids: list[int], most: int) -> tuple[list[int], float, int]:
        if (most, *ids) in known:
            tokens = known[most, *ids]
            return tokens, 0.0, len(tokens) - 1
        tokens, seconds, steps = write(ids, most)
        known[most, *ids] = tokens
        found["texts"].append({"most": most, "prompt": ids, "tokens": tokens})
        file.write_text(json.dumps(found))
        return tokens, seconds, steps

    return write_or_find
