"""Markdown tables of other engines: redrafter's drafter inside SGLang and vLLM, and redrafter's own server."""

from typing import Any

Result = dict[str, Any]
Columns = dict[str, tuple[str, ...]]
"""Parts of a results file, and which figures of their rows are shown."""


def engines(result: Result) -> str:
    """Speeds of all engines side by side, then the speedups of sampled texts, then arrivals at random times."""
    both = ("plain_tokens_per_s", "redrafter_tokens_per_s")
    columns = {"own": both, "sglang": ("plain_fa3_tokens_per_s", *both), "vllm": both, "vllm_compiled": both}
    lines = [
        "| requests at once | redrafter: plain | with drafts | SGLang: plain, FlashAttention 3 | plain, Triton "
        "| with drafts, Triton | vLLM: plain | with drafts | vLLM, torch.compile: plain | with drafts |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *by_level(result, columns, 0, "{:.0f}"),
        "",
        "| requests at once, temperature 1 | SGLang: speedup | vLLM: speedup |",
        "|---|---|---|",
        *by_level(result, {"sglang": ("ratio",), "vllm": ("ratio",)}, 1, "{:.2f}×"),
    ]
    return "\n".join([*lines, *arrivals(levels(result, "sglang_arrivals"))])


def by_level(result: Result, columns: Columns, temperature: float, form: str) -> list[str]:
    """A line for each number of requests at which the first part was measured; of each part, its columns."""
    found = {
        part: {r["concurrency"]: r for r in levels(result, part) if r["temperature"] == temperature} for part in columns
    }
    lines = []
    for level in sorted(next(iter(found.values()))):
        rows = [(found[part].get(level), names) for part, names in columns.items()]
        cells = [form.format(row[name]) if row else "" for row, names in rows for name in names]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return lines


def levels(result: Result, part: str = "wide") -> list[dict[str, Any]]:
    """The rows with plain and speculative decoding at one number of requests, in the order they were measured."""
    return [r for r in result["rows"] if r["part"] == part and "ratio" in r]


def engine(result: Result) -> str:
    """Another engine, plain and with the plug-in: a line for each number of requests at once."""
    rows = levels(result)
    first = rows[0]  # the level measured first, which plain texts of the others are compared with
    lines = [
        f"| {first['engine']}, {first['model']}: requests at once | plain, tokens/s | redrafter, tokens/s "
        f"| speedup | tokens/step | equal to plain | plain equal to plain at {first['concurrency']} |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: r["concurrency"]):
        rates = f"{r['plain_tokens_per_s']:.0f} | {r['redrafter_tokens_per_s']:.0f} | **{r['ratio']:.2f}×**"
        again = f"{r['plain_equal_to_first_level']} of {min(first['texts'], r['texts'])}" if r is not first else ""
        equal = f"{r['equal']} of {r['texts']} | {again}"
        lines.append(f"| {r['concurrency']} | {rates} | {r['redrafter_tokens_per_step']:.2f} | {equal} |")
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
