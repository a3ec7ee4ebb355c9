"""Time speculative against plain decoding, one request at a time, and compare their texts."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from redrafter.engine import Engine


def once(engine: Engine, prompt: Any, tokens: int, most: int | None = None, **options: Any) -> dict[str, Any]:
    """Write one answer of at most `tokens` tokens; return the time of its prompt, of its steps and until
    the first step, and the text.

    `most` sets the size of the KV cache.
    """
    requests = engine.requests([prompt], max_new_tokens=most or tokens, seed=1, **options)
    synchronize()
    began = time.perf_counter()
    first, step, steps, new = 0.0, 0.0, 0, 0
    text: list[int] = []
    for parts in engine.run(requests):
        text += parts[0].tokens
        if not first:
            first = time.perf_counter()
        else:
            step = step or time.perf_counter()
            steps += 1
            new += len(parts[0].tokens)
        if new >= tokens - 1:
            break
    ended = time.perf_counter()
    synchronize()
    times = {"prompt": first - began, "first_step": step - began, "decode": ended - first}
    return times | {"steps": steps, "tokens": new, "text": text[:tokens]}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def total(rows: list[dict[str, Any]], key: str) -> float:
    return float(sum(r[key] for r in rows))


def compare(
    contenders: dict[str, Engine], prompts: list[Any], tokens: int, rounds: int, **options: Any
) -> dict[str, Any]:
    """Time the contenders in turn over all prompts, for several rounds; ratios are medians over the rounds.

    One round before, which is not counted, compiles and records what the prompts need.
    """
    found: list[dict[str, list[dict[str, Any]]]] = []
    for _ in range(1 + rounds):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for prompt in prompts:
            for name, engine in contenders.items():
                runs[name].append(once(engine, prompt, tokens, **options))
        found.append(runs)
    found = found[1:]

    def rate(runs: list[dict[str, Any]], *keys: str) -> float:
        return total(runs, "tokens") / sum(total(runs, k) for k in keys)

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    last = found[-1]["speculative"]
    pairs = zip(last, found[-1]["plain"], strict=True)
    return {
        "texts": len(last),
        "equal": sum(fast["text"] == slow["text"] for fast, slow in pairs),
        "tokens_per_step": total(last, "tokens") / total(last, "steps"),
        "speedup": median(rate(f["speculative"], "decode") / rate(f["plain"], "decode") for f in found),
        "speedup_with_prompt": median(
            rate(f["speculative"], "prompt", "decode") / rate(f["plain"], "prompt", "decode") for f in found
        ),
        "plain_ms": median(1e3 * total(f["plain"], "decode") / total(f["plain"], "steps") for f in found),
        "step_ms": median(1e3 * total(f["speculative"], "decode") / total(f["speculative"], "steps") for f in found),
        "prompt_ms": median(1e3 * total(f["plain"], "prompt") / len(prompts) for f in found),
        "tokens": total(last, "tokens"),
        "rounds": rounds,
    }
