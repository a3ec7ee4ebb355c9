"""Markdown tables about drafters and acceptance rules: one function per kind of results file."""

import re
from typing import Any

from redrafter.drafters import registry

Result = dict[str, Any]


def speedup(row: dict[str, Any]) -> str:
    """With the 95 % interval where there is one: not for plain decoding itself, nor for a single question."""
    known = row["speedup_low"] is not None and row.get("contender") != "plain"
    return f"{row['speedup']:.2f}×" + (f" ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})" if known else "")


def drafter(result: Result) -> str:
    """Every shape on MT-Bench, with and without n-grams; then the other question sets and MT-Bench's categories.

    Answers that loop are easy to guess, so every second column leaves them out.
    """
    rows = [{"suite": "mt_bench", "drafter": "recurrent"} | r for r in result["rows"] if r["kind"] == "tokens/step"]
    found = {(r["drafter"], r["suite"], r["temperature"], r["shape"], r["answers"]): r["tokens_per_step"] for r in rows}
    kinds = sorted({r["drafter"] for r in rows}, reverse=True)  # with n-grams first
    names = {"recurrent": "drafter alone" if len(kinds) > 1 else "tokens/step", "recurrent+ngram": "with n-grams"}
    heads = "".join(f" {names[kind]} | without answers that loop |" for kind in kinds)
    lines = [f"| T | beam W×L, nodes N |{heads}", "|---|---|" + "---|---|" * len(kinds)]
    for suite, temperature, shape in dict.fromkeys(key[1:4] for key in found):
        if suite == "mt_bench":
            cells = [f"{found[k, suite, temperature, shape, n]:.2f}" for k in kinds for n in ("all", "no loops")]
            lines.append(f"| {temperature:g} | {_beam(shape)} | " + " | ".join(cells) + " |")
    others = [r for r in rows if r["suite"] != "mt_bench" and r["answers"] == "all" and r["drafter"] == kinds[0]]
    others += [r for r in rows if r["answers"] not in ("all", "no loops") and _best(r, rows, kinds[0])]
    if others and len(kinds) > 1:
        lines += ["", "| questions | T | beam W×L, nodes N | with n-grams | drafter alone |", "|---|---|---|---|---|"]
        for r in others:
            what = r["suite"] if r["answers"] == "all" else f"{r['suite']}, {r['answers']}"
            alone = found[kinds[1], r["suite"], r["temperature"], r["shape"], r["answers"]]
            values = f"{r['tokens_per_step']:.2f} | {alone:.2f}"
            lines.append(f"| {what} | {r['temperature']:g} | {_beam(r['shape'])} | {values} |")
    made = next(r for r in result["rows"] if r["kind"] == "training")
    lines += [
        "",
        f"The first of four training runs, on one {made['hardware']}: {made['minutes_of_data']:.1f} minutes to write "
        f"the data, {made['minutes_of_training_command']:.1f} minutes to train.",
    ]
    return "\n".join(lines)


def _beam(shape: str) -> str:
    beam, nodes = shape.replace("x", "×").split(":")
    return f"{beam}, {nodes}"


def _best(row: dict[str, Any], rows: list[dict[str, Any]], drafter: str) -> bool:
    """Whether a row's shape is, at its temperature, the best of those with 63 nodes for all answers."""
    same = [r for r in rows if all(r[k] == row[k] for k in ("suite", "temperature")) and r["drafter"] == drafter]
    whole = [r for r in same if r["answers"] == "all" and r["shape"].endswith(":63")]
    best = max(whole, key=lambda r: r["tokens_per_step"], default=None)
    return row["drafter"] == drafter and best is not None and row["shape"] == best["shape"]


def ablations(result: Result) -> str:
    """One change at a time, after the same short training: tokens/step by beam, temperature and n-grams."""
    rows = [r for r in result["rows"] if r.get("kind", "ablation") == "ablation"]
    shapes = _simulated(rows[0])
    heads = [_named(s).replace(", T = 0", "") for s in shapes]
    lines = ["| variant | parameters | " + " | ".join(heads) + " |", "|---" * (2 + len(shapes)) + "|"]
    for r in rows:
        values = " | ".join(f"{r[s]:.2f}" for s in shapes)
        lines.append(f"| {r['variant']} | {r['parameters'] / 1e6:.1f} M | {values} |")
    first = rows[0]
    hardware = first.get("hardware", result["hardware"])
    lines += ["", f"Each after {_training(rows)}; {hardware.get('gpu') or hardware['cpu']}."]
    return "\n".join(lines)


def _simulated(row: dict[str, Any]) -> list[str]:
    """The columns of simulated tokens/step, for instance "16x5:63, n-grams, T=0"."""
    return [k for k in row if re.fullmatch(r"\d+x\d+(:\d+)?(, n-grams[^,]*)?, T=\d", k)]


def _named(column: str) -> str:
    """
    >>> _named("16x5:63, n-grams, T=0")
    '16×5, 63, n-grams, T = 0'
    """
    return column.replace("x", "×").replace(":", ", ").replace("T=", "T = ")


def _training(rows: list[dict[str, Any]]) -> str:
    """How long all rows were trained."""
    trained = [r for r in rows if r["updates"]]
    updates, positions = [r["updates"] for r in trained], trained[0]["positions"]
    if trained[0].get("minutes") is None:
        return f"{updates[0]} updates of {positions} positions"
    count = f"{min(updates)} to {max(updates)}" if min(updates) < max(updates) else f"{updates[0]}"
    return f"{trained[0]['minutes']:g} minutes of training ({count} updates of {positions} positions)"


def table1(result: Result) -> str:
    """A line for each decoder; suites and temperatures across, as in the paper."""
    rows = [r for r in result["rows"] if r.get("category") == "all"]
    columns = list(dict.fromkeys((r["temperature"], r["suite"]) for r in rows))
    found = {(r["contender"], r["temperature"], r["suite"]): r for r in rows}
    names = {"mt_bench": "MT-Bench", "alpaca_eval": "AlpacaEval"}
    heads = [f"{names.get(suite, suite)}, T = {temperature:g}" for temperature, suite in columns]
    what = next((r["target"] for r in rows if "target" in r), "SmolLM2-135M-Instruct")
    lines = [f"| {what} | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    every = list(dict.fromkeys(r["contender"] for r in rows))
    for name in every:
        cells = []
        for column in columns:
            r = found[name, *column]
            cells.append(f"{speedup(r)}, {r['tokens_per_step']:.2f}")
        mixed = found[name, *columns[0]].get("ngrams", False)  # older results are of drafters alone
        lines.append(f"| {name}{' with n-grams' * mixed} | " + " | ".join(cells) + " |")
    equal, compared, ties = (
        sum(r[k] for r in rows if r["contender"] != "plain") for k in ("equal", "compared", "ties")
    )
    said = "Speedup over plain decoding (95 % interval), then tokens/step."
    lines += ["", f"{said} {equal} of {compared} texts equal plain decoding's; {ties} differ at a numerical tie."]
    return "\n".join(lines)


def peers(result: Result) -> str:
    """tokens/step by beam, then the accuracy of each depth's first guess on held-out texts."""
    rows = result["rows"]
    shapes = _simulated(rows[0])
    depths = range(1, 1 + len(rows[0]["held_out"]["accuracy"]))
    heads = [*map(_named, shapes), *(f"accuracy at depth {d}" for d in depths)]
    lines = ["| drafter | parameters | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for r in rows:
        values = [f"{r[s]:.2f}" for s in shapes] + [f"{100 * a:.1f} %" for a in r["held_out"]["accuracy"]]
        lines.append(f"| {r['drafter']} | {r['parameters'] / 1e6:.1f} M | " + " | ".join(values) + " |")
    lines += ["", f"Each after {_training(rows)}; tokens/step are simulated along the target's answers."]
    return "\n".join(lines)


def rules(result: Result) -> str:
    """A line for each temperature and rule, as in the first paper's Table 2."""
    lines = [
        f"| T | rule, beam {result['rows'][0]['beam']} | tokens/step | equal to plain | log-likelihood per token "
        "| difference from plain |",
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


def registered() -> str:
    """The drafters that have a name."""
    lines = ["| name | what guesses | trained by `redrafter train` | without a folder |", "|---|---|---|---|"]
    for name, entry in registry.ENTRIES.items():
        trained, alone = ("yes" if place else "" for place in (entry.kind, entry.make))
        lines.append(f"| `{name}` | {entry.about} | {trained} | {alone} |")
    return "\n".join(lines)


def exports(result: Result) -> str:
    """Exported drafters, and how far their logits are from those before."""
    lines = ["| export | read back here | read by speculators |", "|---|---|---|"]
    for r in result["rows"]:
        found = r["original"]
        lines.append(f"| {r['export']} | {r['read_back']:.1e} | {'' if found is None else f'{found:.1e}'} |")
    return "\n".join(lines)


def formats(result: Result) -> str:
    """Published formats, and how far our logits are from their originals'."""
    lines = ["| format, layout | original | largest relative difference |", "|---|---|---|"]
    for r in result["rows"]:
        found = r["difference"]
        lines.append(
            f"| {r['format']} | {r['original'] or 'none runs on a CPU'} | {'' if found is None else f'{found:.1e}'} |"
        )
    return "\n".join(lines)


def ngram_odds(result: Result) -> str:
    """How often a copied token is right, by match length and place in the chain."""
    found = {(r["temperature"], r["match"]): r for r in result["rows"]}
    lines = [
        "| T | tokens matched | steps with such a match | first copied token right | second | later |",
        "|---|---|---|---|---|---|",
    ]
    longest = max(size for _, size in found)
    for (temperature, size), r in found.items():
        name = f"{size} or more" if size == longest else f"{size}"
        odds = " | ".join(f"{value:.2f}" for value in r["odds"])
        lines.append(f"| {temperature:g} | {name} | {r['decided'][0]} | {odds} |")
    return "\n".join(lines)
