"""The map from the ReDrafter paper, in both versions, to this repository: one line for every table and figure.

The paper's figures are quoted here; ours are read from the results files.
"""

from typing import Any

from benchmarks.tables.decoding import cpu_setting

Result = dict[str, Any]
Line = tuple[str, str, str, str, str]  # what it is, their figures, ours, the command, the results files

HEAD = "| in the paper | theirs | ours | command | results |\n|---|---|---|---|---|\n"
FASTER = "speedup, tokens/step"
STUDIES = "[studies that are not repeated](experiments.md#studies-that-are-not-repeated)"
"""Where the figures and commits of removed scripts stand."""


def table(*lines: Line) -> str:
    return HEAD + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def json(*names: str) -> str:
    return ", ".join(f"[{name}](../benchmarks/results/{name}.json)" for name in names)


def redrafter(
    table1: Result,
    table1_cpu: Result,
    gpu_13b: Result,
    gpu_33b: Result,
    serve: Result,
    vllm: Result,
    cpu: Result,
    batch: Result,
    packing: Result,
    gpu_7b: Result,
    distillation: Result,
) -> str:
    """Recurrent Drafter for Fast Speculative Decoding, the final version."""
    script = "`benchmarks/table1.py --shape vicuna-7b`"
    loads = {r["concurrency"]: r for r in serve["rows"] if "concurrency" in r}
    served = ", ".join(f"{loads[n]['ratio']:.2f}× with {n}" for n in (1, 8, 32))
    best = max((r for r in batch["rows"] if r["part"] == "batch"), key=lambda r: float(r["tokens_per_second_and_row"]))
    most = max((r for r in batch["rows"] if r["part"] == "batch"), key=lambda r: float(r["tokens_per_second"]))
    most_width = "plain decoding" if most["width"] == 0 else f"W = {most['width']}"
    saved = [r["saved"] for r in packing["rows"]]
    wide = next(r for r in gpu_7b["rows"] if r["part"] == "packing" and (r["rows"], r["tokens"]) == (40, 80))
    narrow = next(r for r in gpu_7b["rows"] if r["part"] == "packing" and (r["rows"], r["tokens"]) == (1, 80))
    learned = distillation["headline"]
    return table(
        (
            "Figure 1",
            "up to 3.5× (PyTorch), 2.5× (TensorRT-LLM), 2.3× (MLX)",
            "a summary of Tables 1 to 4: see there",
            "",
            "",
        ),
        (
            "Figures 2, 3, 4; Listing 1",
            "diagrams, `dedup_prefix`",
            "nothing to measure; the listing's example is a doctest of `core/tree.py`",
            "`pytest src/redrafter/core/tree.py`",
            "",
        ),
        (
            f"Table 1, 7B, MT-Bench, T = 0 ({FASTER})",
            "Medusa 2.39×, 2.55; EAGLE 2.69×, 3.96; ReDrafter 2.80×, 4.20",
            drafters(table1, "mt_bench", 0.0),
            script,
            json("table1_gpu"),
        ),
        (
            "Table 1, 7B, MT-Bench, T = 1",
            "Medusa 2.33×, 2.55; EAGLE 2.31×; ReDrafter 3.50×, 5.31",
            drafters(table1, "mt_bench", 1.0),
            script,
            json("table1_gpu"),
        ),
        (
            "Table 1, 7B, AlpacaEval, T = 0",
            "Medusa 2.19×, 2.42; EAGLE 2.43×, 3.61; ReDrafter 2.69×, 4.06",
            drafters(table1, "alpaca_eval", 0.0),
            script,
            json("table1_gpu"),
        ),
        (
            "Table 1, 7B, AlpacaEval, T = 1",
            "Medusa 2.26×, 2.42; EAGLE 2.20×, 3.29; ReDrafter 3.53×, 5.31",
            drafters(table1, "alpaca_eval", 1.0),
            script,
            json("table1_gpu"),
        ),
        (
            "Table 1, 13B and 33B, MT-Bench, T = 0, ReDrafter",
            "2.80×, 4.21 and 2.61×, 3.87",
            f"{headline(gpu_13b)} and {headline(gpu_33b)} (another, longer trained drafter; no peers, T = 0 and "
            "MT-Bench only)",
            "`benchmarks/gpu.py --shape vicuna-13b`, `--shape vicuna-33b`",
            json("gpu_13b", "gpu_33b"),
        ),
        (
            "Figure 5, Table 1 by category",
            "a plot without numbers",
            categories(table1_cpu),
            "`redrafter bench run`, then `redrafter bench report`",
            json("table1_cpu"),
        ),
        (
            "Table 2, continuous batching, 7B, speedup",
            "2.09×, 2.11×, 1.57× at 0.1, 0.5, 1.0 requests/s (TensorRT-LLM, 8 GPUs)",
            f"{served} concurrent requests (our server, one GPU)",
            "`benchmarks/serve.py --shape vicuna-7b`",
            json("serve_gpu"),
        ),
        (
            "Table 3, tensor parallelism, 7B, speedup",
            "2.19×, 1.82×, 1.68× on 1, 2, 4 GPUs",
            "not measured: needs several GPUs. In vLLM on two CPU ranks "
            f"{ranks(vllm)} texts equal those without the drafter",
            "`benchmarks/vllm_cpu.py`",
            json("vllm_cpu"),
        ),
        (
            f"Table 4, on-device, 7B ({FASTER})",
            "M1 Max 1.32×, 2.15 (W = 1); M2 Ultra 1.52×, 2.44 (W = 3)",
            "not measured: needs Apple silicon, where `redrafter-mlx bench` measures it. Two CPU cores, SmolLM2-135M: "
            f"{cpu['headline']['vs_own_plain']:.2f}×, {cpu['headline']['tokens_per_step']:.2f} "
            f"(W = {cpu_setting(cpu)['shape'].partition('x')[0]})",
            "`benchmarks/cpu.py`",
            json("cpu"),
        ),
        (
            "Table 5, beam width × batch, 7B",
            "most per request: 111 tokens/s (W = 64, batch 2); most in all: 1636 tokens/s (W = 2, batch 80)",
            f"most per request: {best['tokens_per_second_and_row']:.0f} tokens/s (W = {best['width']}, batch "
            f"{best['rows']}); most in all: {most['tokens_per_second']:.0f} tokens/s ({most_width}, batch "
            f"{most['rows']})",
            "`benchmarks/gpu.py --shape vicuna-7b --parts batch`",
            json("gpu_7b_batch"),
        ),
        (
            "Figure 6 left, tokens saved by packing",
            "30–60 % (W = 5 to 70)",
            f"{100 * min(saved):.0f}–{100 * max(saved):.0f} % (W = {packing['rows'][0]['width']} to "
            f"{packing['rows'][-1]['width']})",
            "`benchmarks/packing.py`",
            json("packing"),
        ),
        (
            "Figure 6 right, packing by batch size",
            "a plot: no difference up to batch 4, faster beyond",
            f"W = 16: {narrow['unpacked_ms'] / narrow['packed_ms']:.2f}× faster verification at batch 1, "
            f"{wide['unpacked_ms'] / wide['packed_ms']:.2f}× at batch 40",
            "`benchmarks/gpu.py --shape vicuna-7b --parts packing`",
            json("gpu_7b"),
        ),
        (
            "Table 6, distillation, W = 16, tokens/step",
            "2.87 without, 3.09 with",
            f"{learned['other text, its own tokens']:.2f} (trained on other text), {learned['all of it']:.2f} (on the "
            "target's answers)",
            "`benchmarks/ablations.py`",
            json("distillation"),
        ),
        (
            "Figure 7, beam width × length on M1 Max and M2 Ultra",
            "a plot: best at W = 1 (M1 Max) and W = 3 (M2 Ultra)",
            "not measured: needs Apple silicon, where `redrafter-mlx bench` measures this grid",
            "`redrafter-mlx bench`",
            "",
        ),
    )


def first_version(table1: Result, rnn: Result, peers: Result, rules: Result, batch: Result) -> str:
    """Recurrent Drafter, the first arXiv version."""
    accuracy = {r["drafter"]: r["held_out"]["accuracy"] for r in peers["rows"]}
    right = ", ".join(f"{name} {100 * a[0]:.0f} → {100 * a[-1]:.0f} %" for name, a in accuracy.items())
    plain = {r["rows"]: r["tokens_per_second"] for r in batch["rows"] if r["part"] == "batch" and r["width"] == 0}
    beams = [r for r in batch["rows"] if r["part"] == "batch" and r["width"] > 0]
    gains = {rows: max(r["tokens_per_second"] for r in beams if r["rows"] == rows) / own for rows, own in plain.items()}
    judged = {(r["rule"], r["temperature"]): r for r in rules["rows"]}
    low, high = min(r["temperature"] for r in rules["rows"]), max(r["temperature"] for r in rules["rows"])
    typical = [judged["typical", t]["tokens_per_step"] for t in (low, high)]
    rejection = [judged["rejection", t]["tokens_per_step"] for t in (low, high)]
    return table(
        ("Figures 1, 2; Listing 1", "diagrams, `get_prefix_match`", "as in the final version", "", ""),
        (
            "Figure 3, accuracy from depth 1 to 5",
            "a plot: ReDrafter above Medusa at each depth",
            right,
            "`benchmarks/peers.py`",
            json("peers"),
        ),
        (
            "Figure 4, correlation of accuracy with speed",
            "0.91 without an RNN, 0.80 with (30 drafters)",
            "0.21 without, -0.40 with (7 drafters, briefly trained: too few to confirm or refute)",
            "a script that is no longer kept",
            STUDIES,
        ),
        (
            "Figure 4, with and without the RNN",
            "a plot: more accurate with it",
            f"{rnn['headline']['plain RNN']:.2f} tokens/step with, {rnn['headline']['no RNN']:.2f} without",
            "`benchmarks/ablations.py`",
            json("rnn"),
        ),
        (
            f"Table 1, 7B, greedy ({FASTER})",
            "Medusa 2.28×, 2.52; ReDrafter 2.67×, 3.41",
            drafters(table1, "mt_bench", 0.0, ("medusa", "recurrent")),
            "`benchmarks/table1.py --shape vicuna-7b`",
            json("table1_gpu"),
        ),
        (
            "Table 1, quality; typical acceptance",
            "MT-Bench score 5.84 plain, 5.92 greedy, 5.87 typical; typical 3.28×, 4.39",
            "no judge model here. Greedy text equals plain decoding's; for `typical` see Table 2",
            "",
            "",
        ),
        (
            "Figure 5a, tokens/step by length of the answer",
            "a plot: constant",
            "2.05–2.31 from 16 to 128 tokens",
            "a script that is no longer kept",
            STUDIES,
        ),
        ("Figure 5b, packing", "a plot", "Figure 6 left of the final version", "", ""),
        (
            "Figure 6a, speed by batch size",
            "a plot: throughput grows up to batch 16",
            "best beam against plain: " + ", ".join(f"{gains[n]:.1f}× at batch {n}" for n in (1, 4, 10, 20, 40)),
            "`benchmarks/gpu.py --shape vicuna-7b --parts batch`",
            json("gpu_7b_batch"),
        ),
        ("Figure 6b, packing by batch size", "a plot", "Figure 6 right of the final version", "", ""),
        (
            f"Table 2, rejection, T = {low:g} and {high:g}",
            "speedup 2.58× and 3.43×, quality 1.00 and 0.93",
            f"{rejection[0]:.2f} and {rejection[1]:.2f} tokens/step; log-likelihood "
            f"{quality(judged['rejection', low])} and {quality(judged['rejection', high])} against plain",
            "`benchmarks/rules.py`",
            json("rules"),
        ),
        (
            f"Table 2, typical, T = {low:g} and {high:g}",
            "speedup 2.62× and 3.49×, quality 1.00 and 0.86",
            f"{typical[0]:.2f} and {typical[1]:.2f} tokens/step; log-likelihood {quality(judged['typical', low])} and "
            f"{quality(judged['typical', high])} against plain",
            "`benchmarks/rules.py`",
            json("rules"),
        ),
    )


def drafters(result: Result, suite: str, temperature: float, names: tuple[str, ...] = ()) -> str:
    """Speedup and tokens/step of each drafter in one cell of Table 1, alone and with n-grams."""
    rows = [r for r in result["rows"] if r.get("category") == "all"]
    own = {r["contender"]: r for r in rows if (r["suite"], r["temperature"]) == (suite, temperature)}
    shown = {"medusa": "Medusa", "eagle": "EAGLE", "recurrent": "recurrent"}

    def cell(suffix: str) -> str:
        found = {shown[n]: own[n + suffix] for n in names or shown if n + suffix in own}
        return "; ".join(f"{n} {r['speedup']:.2f}×, {r['tokens_per_step']:.2f}" for n, r in found.items())

    if not own:
        return "not measured"
    if not any(r.get("ngrams") for r in own.values()):
        return cell("")
    return ". ".join(filter(None, [cell(" alone"), f"With n-grams: {cell('')}"]))


def headline(result: Result) -> str:
    head = result["headline"]
    return f"{head['speedup']:.2f}×, {head['tokens_per_step']:.2f}"


def categories(result: Result) -> str:
    """The recurrent drafter's range over the categories of MT-Bench at T = 0."""
    rows = [
        r
        for r in result["rows"]
        if r.get("category") not in ("all", None)
        and (r["suite"], r["temperature"], r["contender"]) == ("mt_bench", 0.0, "recurrent")
    ]
    low, high = (f(rows, key=lambda r: float(r["speedup"])) for f in (min, max))
    return (
        "on a CPU, an earlier version in fp32, MT-Bench, T = 0: "
        f"from {low['speedup']:.2f}× ({low['category']}) to {high['speedup']:.2f}× ({high['category']})"
    )


def ranks(result: Result) -> str:
    rows = [r for r in result["rows"] if r.get("ranks") == 2 and "equal" in r]
    return f"{sum(r['equal'] for r in rows)} of {sum(r['texts'] for r in rows)}"


def quality(row: dict[str, Any]) -> str:
    return f"{row['more_than_plain']:+.2f} ± {row['standard_error']:.2f}"
