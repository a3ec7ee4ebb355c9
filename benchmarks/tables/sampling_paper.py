"""The map from the paper on speculative sampling to this repository: one line for every table and figure.

The paper's figures are quoted here; ours are read from the results files.
"""

from typing import Any

from benchmarks.tables.redrafter_paper import Result, json, table


def speculative_sampling(
    summaries: Result, speech: Result, summaries_cpu: Result, speech_cpu: Result, kernel: Result
) -> str:
    """Optimized Speculative Sampling for GPU Hardware Accelerators."""
    both = "`redrafter bench sampling summaries`, `redrafter bench sampling speech`"
    files = json("summaries", "speech_sampling")

    def each(name: str, form: str, scale: float = 1.0) -> str:
        cells = []
        for what, result in (("summaries", summaries), ("speech", speech)):
            rows = {r["way"]: r for r in result["rows"] if r["table"] == "1, 5, 6"}
            numbers = ", ".join(
                f"{label} {form.format(scale * rows[way][name])}"
                for way, label in (("paper_exact", "exact"), ("sigmoid_lossy", "sigmoid"), ("fused", "redrafter"))
            )
            cells.append(f"{what}: {numbers}")
        return "; ".join(cells)

    def by_gamma(name: str, form: str, scale: float) -> str:
        rows = [r for r in summaries["rows"] if r["table"] == "8" and r["way"] == "fused"]
        return ", ".join(form.format(scale * r[name]) for r in rows)

    def peaks(result: Result) -> str:
        own = [r["peak_memory_bytes"] / 2**20 for r in result["rows"] if r["table"] == "8"]
        return f"{min(own):.0f}–{max(own):.0f} MiB"

    calls = [r["headline"] for r in (summaries_cpu, speech_cpu)]
    return table(
        ("Figures 1, 2", "diagrams of the kernels", "nothing to measure; `bench/paper_kernels` has both", "", ""),
        (
            "Table 1, verification time saved",
            "exact 5.7–12.5 %, sigmoid 37–94 %",
            each("profiling_reduction", "{:.0f} %", 100),
            both,
            files,
        ),
        (
            "Table 1, ROUGE-1 and WER",
            "exact equals the baseline; sigmoid −0.02 to −0.06 ROUGE-1, +0.01 to +0.08 WER",
            f"ROUGE-1 {scores(summaries, 'rouge1')}; WER {scores(speech, 'wer')} (baseline, exact, sigmoid, redrafter)",
            both,
            files,
        ),
        (
            "Tables 2, 7, scale of the sigmoid",
            "WER 0.41, 0.28, 0.26, 29.3 at ±10¹, 10³, 10⁴, 10⁵ (baseline 0.24)",
            "WER " + ", ".join(f"{r['wer']:.2f}" for r in scales(speech)) + " at "
            "±" + ", ".join(f"{r['scale']:g}" for r in scales(speech)),
            "`redrafter bench sampling speech`",
            json("speech_sampling"),
        ),
        (
            "Table 3, bandwidth",
            "9–54 GB/s baseline, 11–39 exact, 16–63 sigmoid (from the profiler's counters)",
            each("bytes_per_second", "{:.1f} GB/s", 1e-9) + " (bytes counted, not profiled). The kernel alone at batch "
            f"64: {100 * kernel['headline']['b64_bandwidth_fraction']:.0f} % of the bandwidth",
            both + ", `benchmarks/verify_kernel.py`",
            json("summaries", "speech_sampling", "verify_kernel"),
        ),
        (
            "Table 4, an RTX 2080 Ti",
            "exact 5–13 %, sigmoid 62–82 % saved",
            "not measured: no such GPU. On a CPU the reference implementations take "
            f"{-100 * calls[0]['fused_profiling_reduction']:+.0f} % (summaries) and "
            f"{-100 * calls[1]['fused_profiling_reduction']:+.0f} % (speech)",
            both,
            json("summaries_cpu", "speech_sampling_cpu"),
        ),
        (
            "Table 5, wall clock saved",
            "exact 1.2–10.9 %, sigmoid 18–66 %",
            each("wall_reduction", "{:.0f} %", 100) + " (few texts: noise)",
            both,
            files,
        ),
        (
            "Table 6, time per decoding step",
            "baseline 4.0–12.0 ms, exact 3.6–11.2 ms, sigmoid 3.1–4.6 ms",
            each("call_microseconds", "{:.2f} ms", 1e-3),
            both,
            files,
        ),
        (
            "Table 8, acceptance at γ = 3, 5, 10, 15",
            "46–56 % for baseline and exact",
            f"{by_gamma('acceptance', '{:.0f} %', 100)} (a weaker draft model, one text)",
            "`redrafter bench sampling summaries`",
            json("summaries"),
        ),
        (
            "Figure 3, time per step by γ",
            "a plot: constant over γ; Table 8: 2.8–5.0 ms",
            f"{by_gamma('call_microseconds', '{:.2f} ms', 1e-3)} at γ = 3, 5, 10, 15",
            "`redrafter bench sampling summaries`",
            json("summaries"),
        ),
        (
            "Figures 4, 5, peak memory by γ",
            "plots: within 200 MB (summaries), 10 MB (speech) of the baseline",
            f"{peaks(summaries)} (summaries), {peaks(speech)} (speech) over all methods and γ",
            both,
            files,
        ),
    )


def scores(result: Result, metric: str) -> str:
    return ", ".join(f"{r[metric]:.2f}" for r in result["rows"] if r["table"] == "1, 5, 6")


def scales(result: Result) -> list[dict[str, Any]]:
    return [r for r in result["rows"] if r["table"] == "2, 7" and r["way"] == "sigmoid_lossy"]
