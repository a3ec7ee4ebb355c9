"""The two tables of the README: what speculative decoding gives, and what training a drafter takes.

Both also stand on the results page, where the tables behind them name the commands.
"""

from typing import Any

Result = dict[str, Any]


def expect(
    page: str, cpu: Result, gpu_7b: Result, gpu_13b: Result, gpu_33b: Result, sglang: Result, vllm: Result
) -> str:
    """Measured speedups over plain decoding, by machine, size of the model, weights and kind of drafter.

    `page` is where the links lead: the results page as seen from the page that shows the table, or "" on that page.
    """
    alone = cpu["headline"]
    gpu = gpu_7b["hardware"]["gpu"]
    cores = f"{cpu['hardware']['threads']} cores of a Xeon"
    lines = [
        "| machine | model, weights | n-grams, no training | published drafter | trained drafter |",
        "|---|---|---|---|---|",
    ]

    def add(
        machine: str, model: str, anchor: str = "", trained: float | None = None, ngrams: float | None = None
    ) -> None:
        figures = [
            f"[{figure:.2f}×]({page}#{anchor})" if figure else "not measured" for figure in (ngrams, None, trained)
        ]
        lines.append(f"| {machine} | {model} | {' | '.join(figures)} |")

    at_home = "one-row-on-a-cpu"
    add(cores, "135M, 4 bits", at_home, alone["vs_own_plain"], alone["ms_plain"] / alone["ms_ngram"])
    add(cores, "the same, the answer repeats its prompt", at_home, alone["copying_vs_own_plain"])
    for size, result in (("7B", gpu_7b), ("13B", gpu_13b), ("33B", gpu_33b)):
        add(gpu, f"{size} cost, bf16", "one-row-on-a-gpu", result["headline"]["speedup_with_prompt"])
    for engine, result in (("SGLang", sglang), ("vLLM", vllm)):
        add(f"{gpu}, inside {engine}", "7B cost, bf16", "inside-sglang-and-vllm", result["headline"]["ratio_at_1"])
    add(gpu, "a real model of 1B to 32B, bf16")
    add(gpu, "any size, fp8 or 4 bits")
    add("Apple silicon, other GPUs", "any")
    return "\n".join(lines)


def training(run: Result, peers: Result) -> str:
    """Minutes to write data and to train, and tokens/step, by the size of the target."""
    head = run["headline"]
    gpu = run["hardware"]["gpu"]
    seconds = {r["drafter"]: r for r in peers["rows"]}["recurrent"]
    lines = [
        "| target, machine | to write the data | to train | memory | tokens/step |",
        "|---|---|---|---|---|",
        f"| 135M, {gpu} | {head['minutes_of_data']:.1f} min | {head['minutes_of_training_command']:.1f} min "
        f"| not measured | {head['held_out_tokens_per_step']:.2f} on held-out texts |",
        f"| 135M, a third of an {gpu} | texts of an earlier run | {seconds['seconds'] / 60:.1f} min "
        f"| not measured | {peers['headline']['recurrent_tokens_per_step']:.2f} on MT-Bench, without n-grams |",
    ]
    lines.append("| 1B, 8B, 32B |" + " not measured |" * 4)
    return "\n".join(lines)
