"""Markdown tables of other engines: redrafter's drafter inside SGLang and vLLM, and redrafter's own server."""

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]
Column = tuple[str, str, str, str]
"""Heading, part and beginning of the engine's name in its rows, figure of the row."""

SGLANG, VLLM = "SGLang 0.5.16, Triton", "vLLM 0.26.0, FlashAttention 3"
PLAIN, DRAFTED = "plain_tokens_per_s", "redrafter_tokens_per_s"
SPEEDS: tuple[Column, ...] = (
    ("redrafter: plain", "own", "redrafter", PLAIN),
    ("with drafts", "own", "redrafter", DRAFTED),
    ("SGLang: plain, FlashAttention 3", "wide", SGLANG, "other_plain"),
    ("plain, Triton", "wide", SGLANG, PLAIN),
    ("with drafts, Triton", "wide", SGLANG, DRAFTED),
    ("vLLM: plain", "wide", f"{VLLM}, no", PLAIN),
    ("with drafts", "wide", f"{VLLM}, no", DRAFTED),
    ("vLLM, torch.compile: plain", "wide", f"{VLLM}, torch", PLAIN),
    ("with drafts", "wide", f"{VLLM}, torch", DRAFTED),
)
SAMPLED: tuple[Column, ...] = (
    ("SGLang: speedup", "wide", SGLANG, "ratio"),
    ("vLLM: speedup", "wide", f"{VLLM}, no", "ratio"),
)


def engines(result: Result) -> str:
    """Speeds of all engines side by side, then the speedups of sampled texts, then arrivals at random times."""
    speeds = by_level(result, "requests at once", SPEEDS, 0, "{:.0f}")
    sampled = by_level(result, "requests at once, temperature 1", SAMPLED, 1, "{:.2f}×")
    return "\n".join([*speeds, "", *sampled, *arrivals(levels(result, "arrivals"))])


def by_level(result: Result, first: str, columns: Sequence[Column], temperature: float, form: str) -> list[str]:
    """A line for each number of requests. A cell is empty where nothing was measured."""
    found: dict[int, list[str]] = {}
    for number, (_, part, engine, name) in enumerate(columns):
        for r in levels(result, part, temperature):
            value = figure(r, name) if r["engine"].startswith(engine) else None
            if value is not None:
                found.setdefault(r["concurrency"], [""] * len(columns))[number] = form.format(value)
    heads = [first, *(heading for heading, *_ in columns)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {level} | {' | '.join(cells)} |" for level, cells in sorted(found.items()))]


def figure(row: dict[str, Any], name: str) -> float | None:
    """One figure of a row, if it was measured. `other_plain`: of a further contender that decodes plainly."""
    if name != "other_plain":
        return row.get(name)
    plain = [other["tokens_per_s"] for other in row.get("also", []) if other["settings"].get("drafts") is False]
    return plain[0] if plain else None


def levels(result: Result, part: str = "wide", temperature: float | None = None) -> list[dict[str, Any]]:
    """The rows with plain and speculative decoding, in the order they were measured; all temperatures by default."""
    rows = [r for r in result["rows"] if r["part"] == part and "ratio" in r]
    return [r for r in rows if temperature is None or r["temperature"] == temperature]


def engine(result: Result) -> str:
    """Another engine, plain and with the plug-in: a line for each number of requests at once."""
    rows = levels(result, temperature=0)
    first = rows[0]  # the level measured first, which plain texts of the others are compared with
    lines = [
        f"| {first['engine']}, {first['model']}: requests at once | plain, tokens/s | redrafter, tokens/s "
        f"| speedup | tokens/step | equal to plain | plain equal to plain at {first['concurrency']} |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: r["concurrency"]):
        level = f"{r['concurrency']} (commit {r['commit']})" if "commit" in r else r["concurrency"]
        rates = f"{r['plain_tokens_per_s']:.0f} | {r['redrafter_tokens_per_s']:.0f} | **{r['ratio']:.2f}×**"
        again = f"{r['plain_equal_to_first_level']} of {min(first['texts'], r['texts'])}" if r is not first else ""
        equal = f"{r['equal']} of {r['texts']} | {again}"
        lines.append(f"| {level} | {rates} | {r['redrafter_tokens_per_step']:.2f} | {equal} |")
    return "\n".join([*lines, *arrivals(levels(result, "arrivals"))])


def arrivals(rows: list[dict[str, Any]]) -> list[str]:
    """Requests that arrive at random times: the speed that one request's user sees."""
    if not rows:
        return []
    head = f"{rows[0]['engine']}: requests per second, at random times"
    lines = ["", f"| {head} | plain, tokens/s of a request | redrafter | speedup |", "|---|---|---|---|"]
    for r in rows:
        speeds = f"{r['plain_request_tokens_per_s']:.0f} | {r['redrafter_request_tokens_per_s']:.0f}"
        lines.append(f"| {r['requests_per_s']:g} | {speeds} | **{r['ratio']:.2f}×** |")
    return lines


def vllm(result: Result) -> str:
    """Equality and tokens/step by part; then speed, where it was measured."""
    head = result["headline"]
    names = {"turns": "MT-Bench's first turns", "mixed": "32 concurrent, mixed lengths, prefix cache on"}
    lines = [
        "| requests | ranks | equal | ties | wrong | tokens/step | redrafter's own engine |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        if r["part"] in names:
            own = f"{head['own_tokens_per_step']:.2f}" if r["part"] == "turns" else ""
            lines.append(
                f"| {names[r['part']]} | {r['ranks']} | {r['equal']} of {r['texts']} | {r['ties']} | {r['wrong']} "
                f"| {r['tokens_per_step']:.2f} | {own} |"
            )
    speeds = [r for r in result["rows"] if r["part"] == "speed"]
    if speeds:
        said = ", ".join(f"{r['vs_plain']:.2f}× with {r['at_once']} concurrent requests" for r in speeds)
        load = max(r["load"][0] for r in speeds)
        busy = f"; the machine was not idle (load average up to {load:.1f})" if load > 3 else ""
        lines += ["", f"Speedup over plain vLLM: {said}{busy}."]
    return "\n".join(lines)
