"""Markdown tables of other engines: redrafter's drafter inside SGLang and vLLM, and redrafter's own server."""

from typing import Any

Result = dict[str, Any]


def engines(sglang: Result, vllm: Result) -> str:
    """tokens/s of all engines side by side. redrafter's own were measured along with SGLang's."""
    lines = [
        "| requests at once | redrafter: plain | with drafts | SGLang: plain | with drafts | vLLM: plain "
        "| with drafts |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [{r["concurrency"]: r for r in rows} for rows in (levels(sglang, "own"), levels(sglang), levels(vllm))]
    for level in sorted(set.intersection(*map(set, found))):
        names = ("plain_tokens_per_s", "redrafter_tokens_per_s")
        cells = [f"{one[level][name]:.0f}" for one in found for name in names]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    files = ", ".join(f"[{x}.json](../benchmarks/results/{x}.json)" for x in ("sglang_gpu", "vllm_gpu"))
    return "\n".join(
        [*lines, "", f"tokens/s on one H200, SmolLM2-135M behaviour at 7B cost, bf16, MT-Bench ({files})."]
    )


def levels(result: Result, part: str = "wide") -> list[dict[str, Any]]:
    """The rows with plain and speculative decoding at one number of requests, in the order they were measured."""
    return [r for r in result["rows"] if r["part"] == part and "ratio" in r]


def engine(result: Result) -> str:
    """Another engine, plain and with the plug-in: a line for each number of requests at once."""
    rows = levels(result)
    first = rows[0]  # the level measured first, which plain texts of the others are compared with
    lines = [
        f"| {first['engine']}, {first['model']}: requests at once | plain, tokens/s | redrafter, tokens/s "
        f"| speedup | tokens/step | equal to plain | plain equal to itself at level {first['concurrency']} |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: r["concurrency"]):
        rates = f"{r['plain_tokens_per_s']:.0f} | {r['redrafter_tokens_per_s']:.0f} | **{r['ratio']:.2f}×**"
        equal = f"{r['equal']} of {r['texts']} | {r['plain_equal_to_first_level']} of {min(first['texts'], r['texts'])}"
        lines.append(f"| {r['concurrency']} | {rates} | {r['redrafter_tokens_per_step']:.2f} | {equal} |")
    return "\n".join([*lines, *arrivals(levels(result, "arrivals"))])


def arrivals(rows: list[dict[str, Any]]) -> list[str]:
    """Requests that arrive at random times: the speed that one request's user sees."""
    if not rows:
        return []
    lines = ["", "| requests per second, at random times | plain, tokens/s of a request | redrafter | speedup |"]
    lines.append("|---|---|---|---|")
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
