"""Figures of what engines wrote: speeds, ratios, where texts part."""

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.engines.client import Written

LEVELLED = {"wide": "", "own": "own_"}
"""Parts with rows by concurrent requests, and how their figures' names begin."""


def speed(rounds: Sequence[Written]) -> float:
    """tokens/s, the median of all rounds."""
    return median(done.tokens / done.seconds for done in rounds)


def ratios(one: Sequence[Written], two: Sequence[Written]) -> list[float]:
    """How much faster the second is, round by round."""
    return [speed([b]) / speed([a]) for a, b in zip(one, two, strict=True)]


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of all parts that have rows."""
    found, kinds = dict[str, float](), dict[str, list[dict[str, Any]]]()
    texts = [r for r in rows if r["part"] == "small" and "equal" in r]
    texts = [r for r in texts if r["settings"] == texts[-1]["settings"]]  # those that were tried last worked
    if texts:
        found["small_equal"] = sum(r["equal"] for r in texts) / sum(r["count"] for r in texts)
        partings = sum(len(r["parted_at"]) for r in texts)
        found["small_partings_per_1000_tokens"] = 1000 * partings / max(1, sum(r["agreeing_tokens"] for r in texts))
    for r in rows:
        if r["part"] in LEVELLED and "ratio" in r:
            sampled = f"t{r['temperature']:g}_" if r["temperature"] else ""
            kinds.setdefault(LEVELLED[r["part"]] + sampled, []).append(r)
    for before, levels in kinds.items():
        for r in levels:
            found[f"{before}ratio_at_{r['concurrency']}"] = r["ratio"]
            plain = [other["tokens_per_s"] for other in r.get("also", []) if other["settings"].get("drafts") is False]
            if plain:
                found[f"{before}ratio_to_other_plain_at_{r['concurrency']}"] = r["redrafter_tokens_per_s"] / max(plain)
            if r["concurrency"] == 1:
                found[f"{before}tokens_per_step"] = r["redrafter_tokens_per_step"]
        found[f"{before}min_ratio_to_plain"] = min(r["ratio"] for r in levels)
        compared = [r for r in levels if "equal" in r]
        if compared:
            found[f"{before}equal"] = sum(r["equal"] for r in compared) / sum(r["texts"] for r in compared)
    for r in rows:
        if r["part"] == "arrivals" and "ratio" in r:
            found[f"ratio_at_{r['requests_per_s']:g}_per_s"] = r["ratio"]
    return found


def parted(one: Sequence[list[int]], two: Sequence[list[int]]) -> list[int]:
    """For every pair of texts that differ, the position of the first difference.

    >>> parted([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    [1]
    """
    return [agreeing(a, b) for a, b in zip(one, two, strict=True) if a != b]


def agreeing(one: list[int], two: list[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
