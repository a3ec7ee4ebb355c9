"""Markdown tables of other engines: redrafter's drafter inside SGLang and vLLM, and redrafter's own server."""

from typing import Any

Result = dict[str, Any]


def engines(sglang: Result, vllm: Result, own: Result) -> str:
    """tokens/s of all engines side by side, at the loads that all were measured at."""
    lines = [
        "| load | redrafter's server: plain | with drafts | SGLang: plain | with drafts | vLLM: plain | with drafts |",
        "|---|---|---|---|---|---|---|",
    ]
    others = [{r["concurrency"]: r for r in levels(result)} for result in (sglang, vllm)]
    for r in own["rows"]:
        level = r.get("concurrency")
        if level is None or not all(level in other for other in others):
            continue
        cells = [f"{r['plain_tokens_per_second']:.0f}", f"{r['speculative_tokens_per_second']:.0f}"]
        for other in others:
            cells += [f"{other[level][name]:.0f}" for name in ("plain_tokens_per_s", "redrafter_tokens_per_s")]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    files = ", ".join(f"[{x}.json](../benchmarks/results/{x}.json)" for x in ("serve_gpu", "sglang_gpu", "vllm_gpu"))
    return "\n".join(
        [*lines, "", f"tokens/s on one H200, SmolLM2-135M behaviour at 7B cost, bf16, MT-Bench ({files})."]
    )


def levels(result: Result) -> list[dict[str, Any]]:
    """The rows with plain and speculative decoding at one number of requests, in the order they were measured."""
    return [r for r in result["rows"] if r["part"] == "wide" and "ratio" in r]


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
    return "\n".join(lines)


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
