"""Reports of one or several runs: a self-contained HTML page, and Markdown tables."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from redrafter.bench import draw
from redrafter.bench.specs import REFERENCE
from redrafter.bench.statistics import Record, contenders, settings, summaries
from redrafter.bench.studies import figures
from redrafter.page import document, text

Summary = dict[str, Any]
COLUMNS = ("contender", "tokens/step", "speedup", "with prompt", "tokens/s", "first token, ms", "equal to plain")


def cells(row: Summary) -> list[str]:
    """Return the cells of a contender's table row."""
    return [
        row["contender"],
        f"{row['tokens_per_step']:.2f}",
        interval(row, "speedup"),
        interval(row, "speedup_with_prompt"),
        f"{row['tokens_per_second']:.1f}",
        f"{row['ms_to_first_token']:.0f}",
        equality(row),
    ]


def interval(row: Summary, name: str) -> str:
    """
    >>> interval({"contender": "x", "speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.75}, "speedup")
    '1.50× (1.25–1.75)'
    """
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    if value is None:
        return "–"
    return f"{value:.2f}×" + ("" if low is None or row["contender"] == REFERENCE else f" ({low:.2f}–{high:.2f})")


def equality(row: Summary) -> str:
    if not row["compared"]:
        return "not compared"
    said = f"{row['equal']} of {row['compared']}"
    return said + (f", {row['ties']} ties" if row["ties"] else "")


def title(setting: tuple[str, float, int]) -> str:
    suite, temperature, batch = setting
    return f"{suite}, T = {temperature:g}" + (f", batch {batch}" if batch > 1 else "")


def markdown(rows: Sequence[Summary]) -> str:
    """Return a table per setting."""
    parts = []
    for setting in settings(rows):
        here = [r for r in rows if _of(r) == setting and r["category"] == "all"]
        parts += [f"**{title(setting)}**, {here[0]['answers']} answers each", ""]
        parts += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        parts += ["| " + " | ".join(cells(r)) + " |" for r in here]
        parts.append("")
    return "\n".join(parts).strip() + "\n"


def page(runs: Sequence[tuple[dict[str, Any], list[Record]]], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page. `runs` are facts and records of each run; `others` are results files to plot as well."""
    records = [r for _, found in runs for r in found]
    rows = summaries(records, REFERENCE, by_category=True)
    names = contenders(records)
    parts = ["<h1>redrafter bench</h1>", f'<p class="lead">{lead(rows)}</p>']
    for setting in settings(records):
        here = [r for r in rows if _of(r) == setting]
        parts += [
            f"<h2>{escape(title(setting))}</h2>",
            table(COLUMNS, [cells(r) for r in here if r["category"] == "all"]),
        ]
        parts += ['<div class="charts">', *pictures(here, names), "</div>"]
    drawn = [*beams(rows), *(figure for result in others for figure in figures(result))]
    if drawn:
        parts += ["<h2>Beams, batches and studies</h2>", '<div class="charts">', *drawn, "</div>"]
    parts += ["<h2>The runs</h2>", *(facts_table(facts) for facts, _ in runs)]
    made = "Speedups are relative to plain decoding of the same prompts on the same machine, taking turns, without the "
    made += "prefill unless stated; in brackets, 95 % bootstrap intervals over the questions."
    return document("bench", "\n".join(parts), made)


def lead(rows: Sequence[Summary]) -> str:
    whole = [r for r in rows if r["category"] == "all" and r["contender"] != REFERENCE and r["speedup"] is not None]
    if not whole:
        return "No contender to compare with plain decoding."
    best = max(whole, key=lambda r: r["speedup"])
    where = escape(title(_of(best)))
    compared, equal, ties = (sum(r[k] for r in whole) for k in ("compared", "equal", "ties"))
    said = f"<b>{escape(best['contender'])}: speedup {best['speedup']:.2f} over plain decoding</b> ({where}). "
    return (
        said + f"{equal} of {compared} compared texts equal those of plain decoding; {ties} differ at a numerical tie."
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in lines)
    return f"<table><tr>{top}</tr>{body}</table>"


def pictures(rows: Sequence[Summary], names: Sequence[str]) -> list[str]:
    """Return the charts of one setting."""
    whole = [r for r in rows if r["category"] == "all"]
    guessing = [r for r in whole if r["contender"] != REFERENCE]
    places = {
        r["contender"]: (r["tokens_per_step"], r["speedup"], r["speedup_low"], r["speedup_high"])
        for r in guessing
        if r["speedup"] is not None
    }
    depths = {
        r["contender"]: [(d + 1.0, share) for d, share in enumerate(r["acceptance_by_depth"])]
        for r in guessing
        if r["acceptance_by_depth"]
    }
    categories = [c for c in dict.fromkeys(r["category"] for r in rows) if c != "all"] or ["all"]
    groups: dict[str, dict[str, float | None]] = {
        c: {r["contender"]: r["speedup"] for r in rows if r["category"] == c and r["contender"] != REFERENCE}
        for c in categories
    }
    names = [n for n in names if n != REFERENCE]
    against = draw.points(places, names, "tokens/step")
    return [
        draw.figure("Speedup by category", "over plain decoding", draw.bars(groups, names, line=1.0), names),
        draw.figure("Speedup against tokens/step", "on the line, speedup equals tokens/step", against, names),
        draw.figure("Acceptance by depth", "share of steps", draw.lines(depths, names, "depth"), names),
    ]


def beams(rows: Sequence[Summary]) -> list[str]:
    """Return a heat map of beams and batch sizes, if a run measured a grid of both."""
    found: dict[tuple[str, str], float] = {}
    for r in rows:
        kind, _, shape = r["contender"].partition(" ")
        if r["category"] == "all" and kind == "recurrent" and shape and r["temperature"] == 0:
            found[shape, str(r["batch"])] = r["tokens_per_second"]
    if len({row for _, row in found}) < 2:
        return []
    return [draw.figure("tokens/s by beam and batch", "recurrent, T = 0", draw.heat(found, "beam", "batch"))]


def facts_table(facts: Mapping[str, Any]) -> str:
    """Return a table of the settings and the environment of a run."""
    flat = {"hash": facts["hash"], "command": facts.get("command", "")} | facts["config"] | facts["environment"]
    lines = [[name, _flat(value)] for name, value in flat.items()]
    return table(("setting", "value"), lines)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items())
    return text(value)


def _of(row: Mapping[str, Any]) -> tuple[str, float, int]:
    return row["suite"], row["temperature"], row["batch"]
