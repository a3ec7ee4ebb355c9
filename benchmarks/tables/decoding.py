"""Markdown tables of speed and exactness: one function per kind of results file."""

from typing import Any

Result = dict[str, Any]


def cpu_setting(result: Result) -> dict[str, Any]:
    """The row of `benchmarks/cpu.py` that names the shape. Older results name it in every row."""
    rows: list[dict[str, Any]] = result["rows"]
    return next((row for row in rows if row.get("part") == "setting"), rows[0])


def part(result: Result, name: str) -> list[dict[str, Any]]:
    """The rows of one part of `benchmarks/gpu.py`."""
    return [r for r in result["rows"] if r["part"] == name]


def cpu_demo(result: Result) -> str:
    head = result["headline"]
    lines = ["| prompt | tokens | steps | tokens/step | speedup | text |", "|---|---|---|---|---|---|"]
    speeds = "".join(
        f" {name} {head[key]:.0f} tokens/s."
        for key, name in (
            ("tokens_per_second", "Speculative decoding:"),
            ("plain_tokens_per_second", "Plain decoding:"),
            ("transformers_tokens_per_second", "transformers `generate` in fp32:"),
        )
        if key in head
    )
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
    if "first_token_seconds" in head:
        speeds += f" A new process has its first token {head['first_token_seconds']:.1f} s after its imports."
    return "\n".join(lines if not speeds else [*lines, "", f"Prompts included.{speeds}"])


def cpu(result: Result) -> str:
    """Milliseconds per token with prompts included; speedups over redrafter's own plain decoding."""
    head = result["headline"]
    names = {
        "speculative": "**redrafter, speculative**",
        "ngram": "redrafter, n-grams alone",
        "plain": "redrafter, plain",
        "int8": "redrafter, speculative, int8 activations",
        "int8_plain": "redrafter, plain, int8 activations",
        "transformers": "transformers `generate`, fp32",
        "llama_cpp": "llama.cpp, the same weights in 4 bits",
        "llama_cpp_q4_0": "llama.cpp Q4_0, weights rounded again and repacked",
        "onnxruntime_genai": "onnxruntime-genai, weights in its own 4 bits",
        "ctranslate2": "CTranslate2, weights in 8 bits",
        "openvino": "OpenVINO GenAI, the same weights in 4 bits",
    }
    lines = ["| batch 1, T = 0, prompts included | ms/token | speedup |", "|---|---|---|"]
    for key, name in names.items():
        if f"ms_{key}" in head:
            lines.append(f"| {name} | {head[f'ms_{key}']:.1f} | {head['ms_plain'] / head[f'ms_{key}']:.2f}× |")
    said = [f"{head['equal']:.0f} of {head['texts']:.0f} speculative texts equal the plain ones"]
    if "transformers_texts" in head:
        said.append(f"{head['equal_to_transformers']:.0f} of {head['transformers_texts']:.0f} equal transformers'")
    said.append(f"{head['tokens_per_step']:.2f} tokens/step")
    if "int8_differing_choices" in head:
        said.append(f"with int8 activations {100 * head['int8_differing_choices']:.1f} % of greedy choices differ")
    if "copying_vs_own_plain" in head:
        said.append(f"{head['copying_vs_own_plain']:.2f}× on prompts that ask for a corrected copy of their text")
    engines = {key: name for key, name in names.items() if f"prompt_vs_{key}" in head}
    if engines:
        read = [f"{head[f'prompt_vs_{key}']:.2f}× as fast as by {name.split(',')[0]}" for key, name in engines.items()]
        said.append(f"a prompt of 512 tokens is read {', '.join(read)}")
    if "ms_besides_pass_drafted" in head:
        said.append(f"a step with a draft takes {head['ms_besides_pass_drafted']:.1f} ms besides the target's pass")
    if "rss_mb" in head:
        said.append(f"{head['rss_mb']:.0f} MB of memory")
    return "\n".join([*lines, "", "; ".join(said) + "."])


def gpu(*results: Result) -> str:
    """One column per model size: speed, then the stages of a step, then memory."""
    columns = []
    for result in results:
        run, memory = part(result, "speed")[0], part(result, "memory")[0]
        trace = next(r for r in part(result, "profile") if r["contender"] == "speculative")
        stages = ("draft", "pack", "verify", "accept", "commit", "follow")
        columns.append(
            {
                "": run["target"].removeprefix("SmolLM2-135M behaviour at "),
                "plain, ms/token": f"{run['plain_ms']:.2f}",
                "speculative, ms/step": f"{run['step_ms']:.2f}",
                "tokens/step": f"{run['tokens_per_step']:.2f}",
                "**speedup**, prompts included": f"**{run['speedup_with_prompt']:.2f}×**",
                "speedup without prompts": f"{run['speedup']:.2f}×",
                "efficiency (speedup ÷ tokens/step)": f"{run['efficiency']:.2f}",
                "ms in draft / pack / verify": " / ".join(f"{trace[s + '_ms']:.2f}" for s in stages[:3]),
                "ms in accept / commit / follow": " / ".join(f"{trace[s + '_ms']:.2f}" for s in stages[3:]),
                "GPU kernels in a step": f"{trace['kernels']:.0f}",
                "GPU idle": f"{100 * trace['idle_fraction']:.1f} %",
                "weights of the target, GB": f"{memory['target_gigabytes']:.1f}",
                "weights of the drafter, GB": f"{memory['drafter_gigabytes']:.1f}",
                "peak memory, GB": f"{memory['peak_gigabytes']:.1f}",
            }
        )
    lines = ["| " + " | ".join([f"T = 0, batch 1, beam {run['beam']}", *(c[""] for c in columns)]) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for name in list(columns[0])[1:]:
        lines.append(f"| {name} | " + " | ".join(c[name] for c in columns) + " |")
    return "\n".join(lines)


def long_context(result: Result) -> str:
    lines = ["| prompt, tokens | plain, ms/token | step, ms | tokens/step | speedup |", "|---|---|---|---|---|"]
    for r in part(result, "long"):
        lines.append(
            f"| {r['context']} | {r['plain_ms']:.2f} | {r['step_ms']:.2f} | {r['tokens_per_step']:.2f} "
            f"| {r['speedup']:.2f}× |"
        )
    return "\n".join(lines)


def batch(result: Result) -> str:
    """Tokens per second of the whole batch; the best of each row is bold."""
    found = {(r["rows"], r["width"]): r["tokens_per_second"] for r in part(result, "batch")}
    rows, widths = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    heads = ["plain" if w == 0 else f"W = {w}" for w in widths]
    lines = ["| batch size | " + " | ".join(heads) + " |", "|---" * (1 + len(widths)) + "|"]
    for r in rows:
        best = max(found[r, w] for w in widths)
        cells = [f"**{found[r, w]:.0f}**" if found[r, w] == best else f"{found[r, w]:.0f}" for w in widths]
        lines.append(f"| {r} | " + " | ".join(cells) + " |")
    lines += ["", "Tokens per second of the whole batch, beam length 5, at most 63 nodes."]
    return "\n".join(lines)


def packing(beams: Result, times: Result) -> str:
    """How many tokens packing saves; what that is worth in time."""
    rows = part(times, "packing")
    took = {(r["rows"], r["tokens"]): (r["unpacked_ms"], r["packed_ms"]) for r in rows}
    batches = list(dict.fromkeys(r["rows"] for r in rows))
    heads = [f"ms, batch {b}" for b in batches]
    lines = [
        "| beam W×L | tokens | nodes (1st–99th percentile) | fewer | " + " | ".join(heads) + " |",
        "|---" * (4 + len(batches)) + "|",
    ]
    for r in beams["rows"]:
        cells = ["{:.1f} → {:.1f}".format(*took[b, r["before"]]) for b in batches]
        nodes = f"{r['after_mean']:.1f} ({r['after_p1']}–{r['after_p99']})"
        lines.append(
            f"| {r['width']}×{r['length']} | {r['before']} | {nodes} | {100 * r['saved']:.0f} % | "
            + " | ".join(cells)
            + " |"
        )
    lines += ["", "The ms columns show one verification pass at 7B cost: the beam as it is → packed as a tree."]
    return "\n".join(lines)


def serving(result: Result) -> str:
    """A line for each load, with the 95 % interval of the speedup."""
    rows = [r for r in result["rows"] if "concurrency" in r]
    lines = [
        f"| {rows[0]['target']}: concurrent requests | plain, ms/token | speculative, ms/token | p99 "
        "| time to first token, ms | speedup | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = f"{r['plain_token_ms']:.1f} | {r['speculative_token_ms']:.1f} | {r['speculative_token_ms_p99']:.1f}"
        interval = f"{r['ratio_low']:.2f}–{r['ratio_high']:.2f}"
        lines.append(
            f"| {r['concurrency']} | {times} | {r['speculative_first_ms']:.0f} | **{r['ratio']:.2f}×** ({interval}) "
            f"| {r['rounds']} |"
        )
    return "\n".join(lines)


def serve_equality(result: Result) -> str:
    head = result["headline"]
    return (
        f"{head['requests']} concurrent requests with mixed parameters, some of them plain, {head['cancelled']} "
        f"cancelled midway. Of {head['finished']} finished answers, {head['equal']} equal what plain decoding writes "
        f"for the same request alone, {head['ties']} differ at a numerical tie, {head['wrong']} are wrong."
    )


def past_answers(result: Result) -> str:
    head = result["headline"]
    lines = [
        "| asked after the first prompts | steps | tokens/step without | with | ms/token without | with | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['part']}, T = {row['temperature']:g} | {row['steps'].replace('x', '×')} "
        f"| {row['tokens_per_step_without']:.2f} | {row['tokens_per_step']:.2f} "
        f"| {row['ms_per_token_without']:.1f} | {row['ms_per_token']:.1f} | **{row['speedup']:.2f}×** |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, "", f"{head['equal']} of {head['answers']} texts are equal with and without."])


def structured(result: Result) -> str:
    """Counts of valid and equal answers; times only if the run measured them."""
    head = result["headline"]
    (setup,) = part(result, "setup")
    lines = [
        f"| {setup['target']}, {setup['rows']} answers at once | |",
        "|---|---|",
        f"| answers, at T = 0 and T = 1 | {head['texts']} |",
        f"| end by themselves | {head['finished']} |",
        f"| of these, valid by their schema | **{head['valid']}** |",
        f"| equal plain decoding with the same grammar | **{head['equal']} of {head['texts']}** |",
        f"| tokens/step | {head['tokens_per_step']:.2f} |",
        f"| tokens/step of the first {len([r for r in result['rows'] if 'unforced_steps' in r])} answers, with and "
        f"without forced tokens | {head['tokens_per_step_forced']:.2f}, {head['tokens_per_step_unforced']:.2f} |",
    ]
    if "speedup" in head:
        timed = next((f"{row['target']}, {row['gpu']}, " for row in part(result, "speed_setup")), "")
        lines += [
            f"| {timed}one answer at a time: speedup over plain decoding with the same grammar "
            f"| **{head['speedup']:.2f}×** |",
            f"| ms/step, plain and speculative | {head['plain_ms']:.2f}, {head['step_ms']:.2f} |",
            f"| of which the grammar takes on the host, mostly while the target verifies | {head['overhead_ms']:.2f} |",
        ]
    return "\n".join(lines)


def equality(result: Result) -> str:
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


def mlx(result: Result) -> str:
    """Texts compared with mlx-lm's own, by precision; then speed, where it was measured."""
    names = {"fp32": "fp32", "q4": "4-bit weights, fp32 activations", "bf16": "bf16"}
    torch = next((f"{r['tokens_per_step']:.3f}" for r in result["rows"] if r["part"] == "torch"), "")
    lines = [
        "| target | beam | texts, tokens | equal | ties | wrong | tokens/step | torch engine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        if r["part"] in names:
            counts = f"{r['texts']} × {r['tokens']} | {r['equal']} of {r['texts']} | {r['ties']} | {r['wrong']}"
            own = f"{r['tokens_per_step']:.3f} | {torch if r['part'] == 'fp32' else ''}"
            lines.append(f"| {names[r['part']]} | {r['shape']} | {counts} | {own} |")
    for r in result["rows"]:
        if r["part"] == "speed":
            busy = f"; the machine was not idle (load average {r['load'][0]:.1f})" if r["load"][0] > 3 else ""
            lines += [
                "",
                f"Speed over plain mlx-lm in fp32, one text at a time: {r['vs_plain']:.2f}× (a rough figure{busy}).",
            ]
    return "\n".join(lines)


def exact_gpu(result: Result) -> str:
    """Speculative texts compared with plain ones on a GPU, token by token."""
    lines = ["| target | dtype | T | prompts, tokens | texts | equal | tokens/step |", "|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        if r["part"] == "served":
            about = f"{r['requests']} requests, {r['rows']} rows | {r['texts']} | {r['equal']} | |"
            lines.append(f"| {r['target']} under load | {r['dtype']} | mixed | {about}")
            continue
        low, high = r["prompt_tokens"]
        lines.append(
            f"| {r['target']} | {r['dtype']} | {r['temperature']:g} | {low:,} to {high:,} | {r['texts']} "
            f"| {r['equal']} | {r['tokens_per_step']:.2f} |"
        )
    return "\n".join(lines)


def serve_start(result: Result) -> str:
    taken = ", ".join(f"{r['seconds']:.1f}" for r in result["rows"])
    return f"From `redrafter serve` to the first answer, in seconds, each in a new process: {taken}."


def server_attack(result: Result) -> str:
    head = result["headline"]
    lines = [
        f"A small request alone takes {head['small_alone_seconds']:.2f} s at most. Memory grows by "
        f"{head['peak_growth_mb']:.0f} MB at most, "
        f"and is {head['kept_growth_mb']:+.0f} MB from its start after the last attack.",
        "",
        "| attack, all at once | statuses | slowest small request, s | slowest `/health`, s |",
        "|---|---|---|---|",
    ]
    for r in result["rows"]:
        statuses = ", ".join(f"{status}: {count}" for status, count in r["statuses"].items())
        slowest = f"{r['small_slowest_seconds']:.2f} | {r['health_slowest_seconds']:.2f}"
        lines.append(f"| {r['attack']} | {statuses} | {slowest} |")
    return "\n".join(lines)
