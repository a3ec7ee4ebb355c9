"""Results as tables in Markdown, one function for each kind of results file."""

import re
from collections.abc import Callable
from typing import Any


def speedup(row: dict[str, Any]) -> str:
    """With its interval, where there is one: not for plain decoding itself, nor for a single question."""
    known = row["speedup_low"] is not None and row.get("contender") != "plain"
    return f"{row['speedup']:.2f}×" + (f" ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})" if known else "")


def cpu_demo(result: dict[str, Any]) -> str:
    head = result["headline"]
    lines = ["| prompt | tokens | steps | tokens/step | speedup | text |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        text = "equal" if row["equal"] else f"differs (gap {row['tie_gap']:.1g})"
        prompt = row["prompt"] if len(row["prompt"]) < 60 else row["prompt"][:57] + "..."
        lines.append(
            f"| {prompt} | {row['tokens']} | {row['steps']} | {row['tokens_per_step']:.2f} "
            f"| {row['speedup']:.2f}× | {text} |"
        )
    lines.append(
        f"| **all** | | | **{head['tokens_per_step']:.2f}** | **{head['speedup']:.2f}×** | {head['ties']:.0f} ties |"
    )
    return "\n".join(lines)


def equality(result: dict[str, Any]) -> str:
    head = result["headline"]
    lines = [
        "| fp32, texts of 128 tokens | drafter | equal | ties | wrong | tokens/step |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['setting']} | {r['drafter']} | {r['equal']} of {r['texts']} | {r['ties']} | {r['wrong']} "
        f"| {r['tokens_per_step']:.2f} |"
        for r in result["rows"]
    ]
    lines.append(f"| **all** | | **{head['equal']} of {head['texts']}** | **{head['ties']}** | **{head['wrong']}** | |")
    return "\n".join(lines)


def bf16_divergence(result: dict[str, Any]) -> str:
    """One line per contender and temperature, with the standard error of a count."""
    whole = result["rows"][0]["texts"]
    lines = [
        f"| bf16, against plain in one batch of {whole} | T | texts that part | per 1000 tokens |",
        "|---|---|---|---|",
    ]
    for temperature, name in dict.fromkeys((r["temperature"], r["contender"]) for r in result["rows"]):
        rows = [r for r in result["rows"] if (r["temperature"], r["contender"]) == (temperature, name)]
        parted, texts, compared = (sum(r[k] for r in rows) for k in ("parted", "texts", "compared"))
        rate, error = 1000 * parted / compared, 1000 * parted**0.5 / compared
        lines.append(f"| {name} | {temperature:g} | {parted} of {texts} | {rate:.1f} ± {error:.1f} |")
    return "\n".join(lines)


def drafter(result: dict[str, Any]) -> str:
    """Every shape measured; answers that loop flatter, so both ways."""
    rows = [r for r in result["rows"] if r["kind"] == "tokens/step"]
    both = {(r["temperature"], r["shape"], r["answers"]): r["tokens_per_step"] for r in rows}
    lines = [
        "| T | beam W×L, nodes N | tokens/step | without answers that loop |",
        "|---|---|---|---|",
    ]
    for temperature, shape in dict.fromkeys((t, s) for t, s, _ in both):
        beam, nodes = shape.replace("x", "×").split(":")
        whole, rest = (both[temperature, shape, name] for name in ("all", "no loops"))
        lines.append(f"| {temperature:g} | {beam}, {nodes} | {whole:.2f} | {rest:.2f} |")
    made = next(r for r in result["rows"] if r["kind"] == "training")
    lines += [
        "",
        f"Made on one {made['hardware']}: {made['minutes_of_data']:.1f} minutes of data, then "
        f"{made['minutes_of_training_command']:.1f} of training, in two runs.",
    ]
    return "\n".join(lines)


def cpu(result: dict[str, Any]) -> str:
    """Milliseconds a token, prompts included."""
    head = result["headline"]
    names = {
        "speculative": "ours, speculative",
        "plain": "ours, plain",
        "transformers": "transformers `generate`, fp32",
        "llama_cpp": "llama.cpp, the same weights in 4 bits",
    }
    lines = [
        "| one row, T = 0, fp32 | ms a token, prompt included | ours, speculative, is so many times as fast |",
        "|---|---|---|",
    ]
    for key, name in names.items():
        ratio = "" if key == "speculative" else f"{head[f'ms_{key}'] / head['ms_speculative']:.2f}×"
        lines.append(f"| {name} | {head[f'ms_{key}']:.1f} | {ratio} |")
    equal = f"{head['equal']:.0f} of {head['texts']:.0f} texts equal to plain decoding's"
    lines += ["", f"{equal}; {head['tokens_per_step']:.2f} tokens/step."]
    return "\n".join(lines)


def gpu(result: dict[str, Any]) -> str:
    """Speed, then where a step's time goes."""
    rows = result["rows"]
    found = next(r for r in rows if r["part"] == "speed")
    lines = [
        f"| {found['target']}, T = 0, one row, beam {found['beam']} | |",
        "|---|---|",
        f"| plain decoding, compiled and recorded | {found['plain_ms']:.2f} ms a token |",
        f"| speculative step | {found['step_ms']:.2f} ms |",
        f"| tokens/step | {found['tokens_per_step']:.2f} |",
        f"| **speedup** | **{found['speedup']:.2f}×** ({found['speedup_with_prompt']:.2f}× with the prompt's pass) |",
        f"| efficiency (speedup ÷ tokens/step) | {found['efficiency']:.2f} |",
    ]
    traced = next(r for r in rows if r["part"] == "profile" and r["contender"] == "speculative")
    stages = ", ".join(
        f"{s} {traced[s + '_ms']:.2f}" for s in ("draft", "pack", "verify", "accept", "commit", "follow")
    )
    lines.append(f"| a step's stages in ms; idle | {stages}; {100 * traced['idle_fraction']:.1f} % |")
    return "\n".join(lines)


def gpu_small(result: dict[str, Any]) -> str:
    """A line for each contender."""
    rows = result["rows"]
    names = {"ours, plain": "plain decoding, compiled and recorded", "ours, speculative": "**speculative decoding**"}
    lines = ["| SmolLM2-135M, T = 0, one row | tokens/s | of plain decoding's |", "|---|---|---|"]
    for r in rows:
        name = names.get(r["contender"]) or r["contender"].replace("transformers, ", "transformers `generate`, ")
        lines.append(f"| {name} | {r['tokens_per_second']:.0f} | {r['against_ours_plain']:.2f}× |")
    ours = rows[1]
    equal = f"{ours['texts_equal_to_ours_plain']} of {ours['texts']} texts equal plain decoding's"
    lines += ["", f"{equal}, in bf16; medians of {ours['rounds']} rounds of these {ours['texts']}."]
    return "\n".join(lines)


def ablations(result: dict[str, Any]) -> str:
    """One change at a time, after the same short training."""
    rows = [r for r in result["rows"] if r["kind"] == "ablation"]
    shapes = {"1x5, T=0": "1×5", "16x5, T=0": "16×5", "16x5:63, T=0": "16×5, 63", "4x5:7, T=0": "4×5, 7"}
    shapes["16x5:63, T=1"] = "16×5, 63, T = 1"
    lines = ["| variant | parameters | " + " | ".join(shapes.values()) + " |", "|---" * (2 + len(shapes)) + "|"]
    for r in rows:
        values = " | ".join(f"{r[s]:.2f}" for s in shapes)
        lines.append(f"| {r['variant']} | {r['parameters'] / 1e6:.1f} M | {values} |")
    first = rows[0]
    lines += [
        "",
        f"Each after {first['updates']} updates of {first['positions']} positions; {first['hardware']['gpu']}.",
    ]
    return "\n".join(lines)


def table1(result: dict[str, Any]) -> str:
    """A line for each contender; suites and temperatures across, as the papers have it."""
    rows = [r for r in result["rows"] if r.get("category") == "all"]
    columns = list(dict.fromkeys((r["temperature"], r["suite"]) for r in rows))
    found = {(r["contender"], r["temperature"], r["suite"]): r for r in rows}
    names = {"mt_bench": "MT-Bench", "alpaca_eval": "AlpacaEval"}
    heads = [f"{names.get(suite, suite)}, T = {temperature:g}" for temperature, suite in columns]
    what = next((r["target"] for r in rows if "target" in r), "speedup, tokens/step")
    lines = [f"| {what} | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    for name in dict.fromkeys(r["contender"] for r in rows):
        cells = []
        for column in columns:
            r = found[name, *column]
            cells.append(f"{speedup(r)}, {r['tokens_per_step']:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    equal, compared, ties = (
        sum(r[k] for r in rows if r["contender"] != "plain") for k in ("equal", "compared", "ties")
    )
    said = "Speedup over plain decoding (95 % interval), tokens/step."
    lines += ["", f"{said} {equal} of {compared} texts equal plain decoding's, {ties} part at a numerical tie."]
    return "\n".join(lines)


def peers(result: dict[str, Any]) -> str:
    """tokens/step by beam, then how often each depth's first guess is right on texts not learned from."""
    rows = result["rows"]
    shapes = [k for k in rows[0] if re.fullmatch(r"\d+x\d+(:\d+)?, T=\d", k)]
    depths = range(1, 1 + len(rows[0]["held_out"]["accuracy"]))
    heads = [s.replace("x", "×").replace(":", ", ").replace("=", " = ") for s in shapes]
    heads += [f"right at depth {d}" for d in depths]
    lines = ["| drafter | parameters | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for r in rows:
        values = [f"{r[s]:.2f}" for s in shapes] + [f"{100 * a:.1f} %" for a in r["held_out"]["accuracy"]]
        lines.append(f"| {r['drafter']} | {r['parameters'] / 1e6:.1f} M | " + " | ".join(values) + " |")
    first = rows[0]
    said = "tokens/step are simulated along the target's answers."
    lines += ["", f"Each after {first['updates']} updates of {first['positions']} positions; {said}"]
    return "\n".join(lines)


def family(result: dict[str, Any]) -> str:
    """Accuracy against measured speed."""
    rows = [r for r in result["rows"] if "speedup" in r]
    last = len(rows[0]["accuracy"])
    lines = [
        f"| RNN | blocks | parameters | right at depth 1 | at depth {last} | tokens/step | speedup | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        right = f"{100 * r['accuracy'][0]:.1f} % | {100 * r['accuracy'][-1]:.1f} %"
        lines.append(
            f"| {'yes' if r['rnn'] else 'no'} | {r['blocks']} | {r['parameters'] / 1e6:.1f} M | {right} "
            f"| {r['tokens_per_step']:.2f} | {speedup(r)} | {r['tokens_per_second']:.0f} |"
        )
    names = {"all": "all", "rnn": "those with an RNN", "no_rnn": "those without"}
    found = {names[k]: result["headline"].get(f"correlation_{k}") for k in names}
    known = ", ".join(f"{v:.2f} for {k}" for k, v in found.items() if v is not None)
    lines += ["", f"Each after {rows[0]['updates']} updates; beam {rows[0]['beam']}."]
    if known:
        lines[-1] += f" Correlation of the last depth's accuracy with tokens/s: {known}."
    return "\n".join(lines)


def rules(result: dict[str, Any]) -> str:
    """A line for each temperature and rule, as in the first paper's Table 2."""
    lines = [
        f"| T | rule, beam {result['rows'][0]['beam']} | tokens/step | equal to plain | log-likelihood a token "
        "| more than plain's |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        name = r["rule"] if r["lossless"] else f"{r['rule']} (lossy)"
        more = "" if r["rule"] == "plain" else f"{r['more_than_plain']:+.3f} ± {r['standard_error']:.3f}"
        lines.append(
            f"| {r['temperature']:g} | {name} | {r['tokens_per_step']:.2f} | {r['equal_to_plain']} of {r['texts']} "
            f"| {r['log_likelihood']:.3f} | {more} |"
        )
    return "\n".join(lines)


def lengths(result: dict[str, Any]) -> str:
    """tokens/step of each drafter, the length of the answers across."""
    rows = result["rows"]
    every = sorted({r["length"] for r in rows})
    found = {(r["drafter"], r["temperature"], r["beam"], r["length"]): r for r in rows}
    lines = [
        "| drafter | T | beam | " + " | ".join(f"{n} tokens" for n in every) + " |",
        "|---" * (3 + len(every)) + "|",
    ]
    for name, temperature, beam in dict.fromkeys(key[:3] for key in found):
        own = [found.get((name, temperature, beam, n)) for n in every]
        values = [f"{r['tokens_per_step']:.2f}" if r else "" for r in own]
        lines.append(f"| {name} | {temperature:g} | {beam} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def serving(result: dict[str, Any]) -> str:
    """A line for each load; the interval is that of the ratio."""
    rows = [r for r in result["rows"] if "concurrency" in r]
    lines = [
        f"| {rows[0]['target']}: requests at once | plain, ms a token | speculative | p99 | first token, ms "
        "| ratio | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = f"{r['plain_token_ms']:.1f} | {r['speculative_token_ms']:.1f} | {r['speculative_token_ms_p99']:.1f}"
        interval = f"{r['ratio_low']:.2f} to {r['ratio_high']:.2f}"
        lines.append(
            f"| {r['concurrency']} | {times} | {r['speculative_first_ms']:.0f} | **{r['ratio']:.2f}×** ({interval}) "
            f"| {r['rounds']} |"
        )
    return "\n".join(lines)


def serve_equality(result: dict[str, Any]) -> str:
    head = result["headline"]
    return (
        f"{head['requests']} requests at once with mixed parameters, some plain, {head['cancelled']} cancelled on the "
        f"way: of {head['finished']} finished answers {head['equal']} equal what plain decoding writes for the request "
        f"alone, {head['ties']} part at a tie, {head['wrong']} are wrong."
    )


def vllm(result: dict[str, Any]) -> str:
    """Equality and tokens/step by part; then speed, where it was measured."""
    head = result["headline"]
    names = {"turns": "MT-Bench's first turns", "mixed": "32 at once, mixed lengths, prefix cache on"}
    lines = ["| requests | ranks | equal | ties | wrong | tokens/step | ours |", "|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        if r["part"] in names:
            own = f"{head['own_tokens_per_step']:.2f}" if r["part"] == "turns" else ""
            lines.append(
                f"| {names[r['part']]} | {r['ranks']} | {r['equal']} of {r['texts']} | {r['ties']} | {r['wrong']} "
                f"| {r['tokens_per_step']:.2f} | {own} |"
            )
    speeds = [r for r in result["rows"] if r["part"] == "speed"]
    if speeds:
        said = ", ".join(f"{r['vs_plain']:.2f}× with {r['at_once']} at once" for r in speeds)
        load = max(r["load"][0] for r in speeds)
        busy = f"; others used the machine too (load average up to {load:.1f})" if load > 3 else ""
        lines += ["", f"Speed against plain vLLM: {said}{busy}."]
    return "\n".join(lines)


def verify_kernel(result: dict[str, Any]) -> str:
    """Microseconds of a call for each contender; the many rows that graphs make independent of Python as such."""
    rows, head = result["rows"], result["headline"]
    took = {(r["contender"], r["batch"], r["how"]): r["microseconds"] for r in rows}
    names = {
        "transformers": "transformers' `_speculative_sampling`",
        "transformers_batched": "the same, batched and never waiting",
        "paper_exact": "the paper's exact tiles",
        "sigmoid_lossy": "the paper's sigmoid (**lossy**)",
        "fused": "ours",
    }
    batches = list(dict.fromkeys(r["batch"] for r in rows))
    columns = [(batch, how) for batch in batches for how in ("eager", "graph") if ("fused", batch, how) in took]
    first = rows[0]
    heads = [f"{batch} row{'s' * (batch > 1)}{', recorded' * (how == 'graph')}" for batch, how in columns]
    title = f"γ = {first['gamma']}, V = {first['vocab']}, bf16; microseconds"
    lines = [f"| {title} | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    for key, name in names.items():
        cells = [f"{took[key, *c]:.0f}" if (key, *c) in took else "" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if "b64_bandwidth_fraction" in head:
        share = f"{100 * head['b64_bandwidth_fraction']:.0f} % of the memory's measured speed"
        lines += ["", f"With 64 rows ours is as fast as reading all drafted logits at {share} would be."]
    sorts = [r for r in rows if r["contender"] == "sorting"]
    if sorts:
        said = ", ".join(
            f"{took['floors', r['batch'], 'eager']:.0f} against {r['microseconds']:.0f} (B = {r['batch']})"
            for r in sorts
        )
        lines += [
            "",
            f"Top-k 50 with top-p 0.9, microseconds for all rows of p, without sorting and by sorting: {said}.",
        ]
    return "\n".join(lines)


def sampling(result: dict[str, Any]) -> str:
    """The paper's Tables 1, 5 and 6: a line for each way; then acceptance by gamma."""
    rows = [r for r in result["rows"] if r["table"] == "1, 5, 6"]
    names = {
        "baseline": "transformers' own",
        "paper_exact": "the paper's exact",
        "sigmoid_lossy": "the paper's sigmoid (**lossy**)",
        "fused": "ours",
    }
    first = rows[0]
    metric, name, what = ("rouge1", "ROUGE-1", "summaries") if "rouge1" in first else ("wer", "WER", "transcripts")
    lines = [
        f"| {first['texts']} {what}, T = {first['temperature']:g} | time in verification | wall clock "
        f"| accepted | {name} | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = [f"{-100 * r[f'{what}_reduction']:+.1f} %" for what in ("profiling", "wall")]
        spent = f"{r['call_microseconds']:.0f} µs a call" + (f", {share[0]} in all" if r is not first else "")
        wall = f"{r['wall_seconds']:.1f} s" + (f", {share[1]}" if r is not first else "")
        peak = f"{r['peak_memory_bytes'] / 2**20:.0f} MiB" if r["peak_memory_bytes"] else ""
        error = r.get(f"{metric}_error")
        good = f"{r[metric]:.3f}" + (f" ± {error:.3f}" if error is not None else "")
        lines.append(f"| {names[r['way']]} | {spent} | {wall} | {100 * r['acceptance']:.1f} % | {good} | {peak} |")
    accepts: dict[str, dict[int, str]] = {}
    for r in result["rows"]:
        if r["table"] == "8" and r["lossless"]:
            accepts.setdefault(r["way"], {})[r["gamma"]] = f"{100 * r['acceptance']:.0f}"
            few = f"{r['texts']} {what} each" if r["texts"] > 1 else "one text"
    if accepts:
        gammas = ", ".join(map(str, accepts["fused"]))
        said = "; ".join(f"{names[way]} {', '.join(shares.values())}" for way, shares in accepts.items())
        lines += ["", f"γ by the paper's heuristic. Accepted with γ = {gammas}, over {few}, in %: {said}."]
    return "\n".join(lines)


BLOCKS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "cpu_demo": ("cpu_demo.json", cpu_demo),
    "equality": ("equality_cpu.json", equality),
    "bf16": ("bf16_divergence.json", bf16_divergence),
    "bf16_cpu": ("bf16_divergence_cpu.json", bf16_divergence),
    "drafter": ("drafter_smollm2.json", drafter),
    "cpu": ("cpu.json", cpu),
    "gpu": ("gpu_7b.json", gpu),
    "gpu_small": ("gpu_small.json", gpu_small),
    "ablation": ("drafter_smollm2.json", ablations),
    "table1_gpu": ("table1_gpu.json", table1),
    "table1_cpu": ("table1_cpu.json", table1),
    "peers": ("peers.json", peers),
    "family": ("family.json", family),
    "rules": ("rules.json", rules),
    "lengths": ("lengths.json", lengths),
    "serve_equality": ("serve_equality.json", serve_equality),
    "serve_cpu": ("serve_cpu.json", serving),
    "serve_gpu": ("serve_gpu.json", serving),
    "vllm": ("vllm_cpu.json", vllm),
    "verify_kernel": ("verify_kernel.json", verify_kernel),
    "summaries": ("summaries.json", sampling),
    "speech_sampling": ("speech_sampling.json", sampling),
    "summaries_cpu": ("summaries_cpu.json", sampling),
    "speech_sampling_cpu": ("speech_sampling_cpu.json", sampling),
}
