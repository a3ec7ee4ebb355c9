"""Figures for results of the scripts in benchmarks/, which are recognised by the keys of their rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from redrafter.bench import draw

Rows = Sequence[Mapping[str, Any]]


def figures(result: Mapping[str, Any]) -> list[str]:
    """Return all figures that can be drawn from a results file."""
    rows = result["rows"]
    where = result["hardware"].get("gpu", result["hardware"].get("cpu", ""))
    kinds = (
        (batches, [r for r in rows if r.get("part") == "batch" and "tokens_per_second" in r]),
        (packing, [r for r in rows if "after_p1" in r]),
        (depths, [r for r in rows if "drafter" in r and "held_out" in r]),
        (rules, [r for r in rows if "rule" in r and "more_than_plain" in r]),
    )
    return [figure for drawn, own in kinds if own for figure in drawn(own, where)]


def batches(rows: Rows, where: str) -> list[str]:
    cells = {(str(r["width"]), str(r["rows"])): r["tokens_per_second"] for r in rows}
    return [draw.figure("tokens/s by beam width and rows", where, draw.heat(cells, "beam width", "rows"))]


def packing(rows: Rows, where: str) -> list[str]:
    names = ["unpacked", "packed, mean", "packed, 1st percentile", "packed, 99th percentile"]
    keys = ("before", "after_mean", "after_p1", "after_p99")
    curves = {n: [(float(r["width"]), float(r[k])) for r in rows] for n, k in zip(names, keys, strict=True)}
    return [draw.figure("Nodes of a beam, packed and unpacked", where, draw.lines(curves, names, "beam width"), names)]


def depths(rows: Rows, where: str) -> list[str]:
    curves = {r["drafter"]: [(d + 1.0, a) for d, a in enumerate(r["held_out"]["accuracy"])] for r in rows}
    drawn = draw.lines(curves, list(curves), "depth")
    return [draw.figure("Top-1 accuracy", f"on held-out texts; {where}", drawn, list(curves))]


def rules(rows: Rows, where: str) -> list[str]:
    found = []
    keys = {
        "tokens_per_step": ("tokens/step by rule", "typical is lossy"),
        "more_than_plain": (
            "Log-likelihood above plain decoding",
            "per token, under the target; lossless rules: 0 within the error",
        ),
    }
    names = [n for n in dict.fromkeys(r["rule"] for r in rows) if n != "plain"]
    for key, (title, hint) in keys.items():
        curves = {n: [(r["temperature"], r[key]) for r in rows if r["rule"] == n] for n in names}
        found.append(draw.figure(title, f"{hint}; {where}", draw.lines(curves, names, "temperature"), names))
    return found
