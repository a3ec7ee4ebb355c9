"""A line plot over a few measured loads, as a self-contained SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDE, HIGH, EDGE = 640, 320, 56
COLOURS = ("#1d5fbf", "#0b7a4b", "#b3261e", "#8a6d00")


def plot_loads(target: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Plot the time per token over the load, from the rows of `redrafter bench serve`."""
    curves = {name: [(r["concurrency"], r[f"{name}_token_ms"]) for r in rows] for name in ("speculative", "plain")}
    return plot(f"{target}: time per token", "requests at once", "ms", curves)


def plot(
    title: str, x: str, y: str, curves: Mapping[str, Sequence[tuple[float, float]]], line: float | None = None
) -> str:
    """Plot named curves of (x, y) points; x values are evenly spaced, y starts at 0, `line` is a reference level."""
    xs = sorted({point[0] for points in curves.values() for point in points})
    top = 1.1 * max([point[1] for points in curves.values() for point in points] + [line or 0.0])

    def at(a: float, b: float) -> tuple[float, float]:
        across = xs.index(a) / max(1, len(xs) - 1)
        return EDGE + across * (WIDE - 2 * EDGE), HIGH - EDGE - b / top * (HIGH - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{HIGH}" fill="#fff"/>',
        f'<text x="{EDGE}" y="24" font-size="14">{escape(title)}</text>',
        f'<text x="{WIDE / 2}" y="{HIGH - 12}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="{EDGE}" y="{EDGE - 10}">{escape(y)}</text>',
    ]
    for a in xs:
        left, low = at(a, 0)
        parts.append(f'<text x="{left:.1f}" y="{low + 18:.1f}" text-anchor="middle">{a:g}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        _, low = at(xs[0], share * top)
        parts.append(f'<path d="M{EDGE} {low:.1f}H{WIDE - EDGE}" stroke="#ddd"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{low + 4:.1f}" text-anchor="end">{share * top:.3g}</text>')
    if line is not None:
        _, low = at(xs[0], line)
        parts.append(f'<path d="M{EDGE} {low:.1f}H{WIDE - EDGE}" stroke="#999" stroke-dasharray="5 4"/>')
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [at(*point) for point in sorted(points)]
        way = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]
        parts.append(f'<text x="{WIDE - EDGE - 120}" y="{24 + 16 * i}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
