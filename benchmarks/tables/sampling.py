"""Markdown tables about verification by p/q and about speech: one function per kind of results file."""

from typing import Any

Result = dict[str, Any]

METHODS = {
    "baseline": "transformers",
    "paper_exact": "the paper's exact kernel",
    "sigmoid_lossy": "the paper's sigmoid kernel (**lossy**)",
    "fused": "redrafter",
}


def verify_kernel(result: Result) -> str:
    """Microseconds per call, launched from Python and replayed as a CUDA graph."""
    rows, head = result["rows"], result["headline"]
    took = {(r["contender"], r["batch"], r["how"]): r["microseconds"] for r in rows}
    names = {
        "transformers": "transformers `_speculative_sampling`",
        "transformers_batched": "the same, batched and without synchronisation",
        "paper_exact": METHODS["paper_exact"],
        "sigmoid_lossy": METHODS["sigmoid_lossy"],
        "fused": METHODS["fused"],
    }
    batches = list(dict.fromkeys(r["batch"] for r in rows))
    columns = [(batch, how) for batch in batches for how in ("eager", "graph") if ("fused", batch, how) in took]
    first = rows[0]
    heads = [f"batch {batch}{', CUDA graph' * (how == 'graph')}" for batch, how in columns]
    title = f"γ = {first['gamma']}, V = {first['vocab']}, bf16; microseconds"
    lines = [f"| {title} | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    for key, name in names.items():
        cells = [f"{took[key, *c]:.0f}" if (key, *c) in took else "" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if "b64_bandwidth_fraction" in head:
        share = f"{100 * head['b64_bandwidth_fraction']:.0f} %"
        lines += ["", f"At batch 64 the time equals reading all drafted logits at {share} of the measured bandwidth."]
    sorts = [r for r in rows if r["contender"] == "sorting"]
    if sorts:
        said = ", ".join(
            f"{took['floors', r['batch'], 'eager']:.0f} instead of {r['microseconds']:.0f} (batch {r['batch']})"
            for r in sorts
        )
        lines += ["", f"Top-k 50 with top-p 0.9, microseconds, thresholds instead of sorting: {said}."]
    return "\n".join(lines)


def parity(result: Result) -> str:
    head = result["headline"]
    return (
        f"The kernel agrees with its reference implementation on {head['agree']} of {head['rows']} rows "
        f"({len(result['rows'])} combinations of rule, vocabulary, batch, number of drafted tokens and dtype)."
    )


def sampling(result: Result) -> str:
    """The paper's Tables 1, 5 and 6, one line per method; then Table 8, acceptance by γ."""
    rows = [r for r in result["rows"] if r["table"] == "1, 5, 6"]
    first = rows[0]
    metric, name, what = ("rouge1", "ROUGE-1", "summaries") if "rouge1" in first else ("wer", "WER", "transcripts")
    lines = [
        f"| {first['texts']} {what}, T = {first['temperature']:g} | µs per call | verification time in all "
        f"| wall clock | accepted | {name} | GB/s | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = ["" if r is first else f"{-100 * r[f'{kind}_reduction']:+.1f} %" for kind in ("profiling", "wall")]
        wall = ", ".join(filter(None, (f"{r['wall_seconds']:.1f} s", share[1])))
        peak = f"{r['peak_memory_bytes'] / 2**20:.0f} MiB" if r["peak_memory_bytes"] else ""
        error = r.get(f"{metric}_error")
        good = f"{r[metric]:.3f}" + (f" ± {error:.3f}" if error is not None else "")
        lines.append(
            f"| {METHODS[r['way']]} | {r['call_microseconds']:.0f} | {share[0]} | {wall} "
            f"| {100 * r['acceptance']:.1f} % | {good} | {r['bytes_per_second'] / 1e9:.1f} | {peak} |"
        )
    accepts: dict[str, dict[int, str]] = {}
    few = ""
    for r in result["rows"]:
        if r["table"] == "8" and r["lossless"]:
            accepts.setdefault(r["way"], {})[r["gamma"]] = f"{100 * r['acceptance']:.0f}"
            few = f"{r['texts']} {what} each" if r["texts"] > 1 else "one text"
    if accepts:
        gammas = ", ".join(map(str, accepts["fused"]))
        said = "; ".join(f"{METHODS[way]} {', '.join(shares.values())}" for way, shares in accepts.items())
        lines += ["", f"γ by the paper's heuristic. Accepted with γ = {gammas}, over {few}, in %: {said}."]
    scales = [r for r in result["rows"] if r["table"] == "2, 7" and r["way"] == "sigmoid_lossy"]
    if scales:
        said = "; ".join(f"±{r['scale']:g}: {r[metric]:.2f}" for r in scales)
        lines += ["", f"{name} of the sigmoid kernel by its scale α, β (Tables 2 and 7): {said}."]
    return "\n".join(lines)


def speech(result: Result) -> str:
    """Whisper tiny.en with each drafter."""
    head = result["headline"]
    lines = [
        f"| Whisper tiny.en, {head['clips']} clips, fp32 | tokens/step | speedup of decoding | texts equal |",
        "|---|---|---|---|",
    ]
    for r in result["rows"]:
        lines.append(
            f"| {r['drafter'].replace('drafter ', 'two decoder layers, beam ')} | {r['tokens_per_step']:.2f} "
            f"| {r['speedup']:.2f}× | {r['texts_equal_plain']} of {head['clips']} |"
        )
    lines += ["", f"Word error rate {100 * head['wer']:.1f} %, the same for every drafter."]
    return "\n".join(lines)
