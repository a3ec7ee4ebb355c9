"""`report.html`: a training run's curves and facts on one page that needs nothing but a browser."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from redrafter.page import Point, document, label, path, text, ticks, write_page
from redrafter.train.journal import NAME, Record, best, read_journal

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40
MOST_POINTS = 400  # a line drawn this wide shows no more
FEW_POINTS = 24  # few enough to show each as a dot
MOST_COLUMNS = 80  # places that answer to the pointer


@dataclass(frozen=True)
class Line:
    """One curve: its name in the legend, its points in order, a CSS colour."""

    name: str
    points: list[Point]
    colour: str = "var(--blue)"
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over updates. `floor` is where the axis begins; without one it begins near the lowest value."""

    title: str
    hint: str
    lines: list[Line]
    floor: float | None = None
    mark: tuple[float, float] | None = None


def write_report(
    folder: Path | str,
    facts: Mapping[str, str | float | int],
) -> Path:
    """Write `report.html` in a run's folder from its journal, all or nothing; returns where it is."""
    path = Path(folder) / "report.html"
    write_page(path, page(Path(folder).resolve().name, read_journal(folder), facts))
    return path


def page(
    name: str,
    records: list[Record],
    facts: Mapping[str, str | float | int],
) -> str:
    """The page, well-formed as XML too."""
    parts = [f"<h1>{escape(name)}</h1>", f'<p class="lead">{lead(records)}</p>', '<div class="charts">']
    parts += [figure(chart) for chart in charts(records)]
    parts += ["</div>", "<h2>The run</h2>", "<table>"]
    parts += [f"<tr><th>{escape(key)}</th><td>{escape(text(value))}</td></tr>" for key, value in facts.items()]
    parts.append("</table>")
    return document(name, "\n".join(parts), f"Made by redrafter from {NAME}, which lies beside this page.")


def lead(records: list[Record]) -> str:
    """What one wants to know first."""
    if not records:
        return "Nothing is in the journal yet."
    last = max(r["update"] for r in records)
    found = best(records)
    if found is None:
        return f"Not yet tried on held-out text, after {last:,} update{'s' * (last != 1)}."
    return f"<b>{found[1]:.2f} tokens/step</b> on held-out text, best at update {found[0]:,} of {last:,}."


def charts(records: list[Record]) -> list[Chart]:
    train = [r for r in records if "held_out" not in r]
    tried = [{"update": r["update"], **r["held_out"]} for r in records if "held_out" in r]
    loss = series(train, "loss")
    losses = [Line("raw", loss, faint=True), Line("smoothed", smooth(loss))]
    checked = series(tried, "loss")
    if any(y is not None for _, y in checked):
        losses.append(Line("held out", checked, "var(--orange)"))
    steps, rate, speed = series(tried, "tokens_per_step"), series(train, "lr"), series(train, "positions_per_second")
    return [
        Chart("Tokens/step", "held out", [Line("tokens/step", steps)], 1.0, best(records)),
        Chart("Loss", "", losses),
        Chart("Accuracy by depth", "held out", depths(tried), 0.0),
        Chart("Accuracy by depth", "training, smoothed", [smoothed(line) for line in depths(train)], 0.0),
        Chart("Learning rate", "", [Line("learning rate", rate)], 0.0),
        Chart("Speed", "positions per second", [Line("positions/s", speed)], 0.0),
    ]


def series(records: Iterable[Record], key: str) -> list[Point]:
    return [(r["update"], number(r.get(key))) for r in records]


def depths(records: list[Record]) -> list[Line]:
    """One line per depth, from blue at the first to orange at the last."""
    rows = [(r["update"], r.get("accuracy") or []) for r in records]
    most = max((len(row) for _, row in rows), default=0)
    found = []
    for depth in range(most):
        points = [(update, number(row[depth]) if depth < len(row) else None) for update, row in rows]
        hue = (215 + 180 * depth / max(most - 1, 1)) % 360
        found.append(Line(f"depth {depth + 1}", points, f"hsl({hue:.0f}, 65%, var(--l))"))
    return found


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def smooth(points: list[Point]) -> list[Point]:
    """Exponential average over about a thirtieth of the run, unbiased at its beginning; gaps stay gaps.

    >>> smooth([(1, 2.0), (2, None), (3, 4.0)])
    [(1, 2.0), (2, None), (3, 4.0)]
    """
    keep = 1 - 2 / (max(1.0, len(points) / 30) + 1)
    total = weight = 0.0
    found: list[Point] = []
    for x, y in points:
        if y is not None:
            total, weight = keep * total + y, keep * weight + 1
        found.append((x, None if y is None else total / weight))
    return found


def smoothed(line: Line) -> Line:
    return Line(line.name, smooth(line.points), line.colour)


def thin(points: list[Point]) -> list[Point]:
    """At most MOST_POINTS of them, each the mean of its neighbours."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return points
    found: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        known = [y for _, y in group if y is not None]
        found.append((group[-1][0], sum(known) / len(known) if known else None))
    return found


def figure(chart: Chart) -> str:
    """A chart with its title and, for more than one line, its legend."""
    hint = f" <span>{escape(chart.hint)}</span>" if chart.hint else ""
    names = [
        f'<span><i style="background: {line.colour}{"; opacity: .4" if line.faint else ""}"></i>'
        f"{escape(line.name)}</span>"
        for line in chart.lines
    ]
    legend = " ".join(names) if len(names) > 1 else ""
    caption = f"<figcaption>{escape(chart.title)}{hint}</figcaption>"
    return f'<figure>{caption}<div class="legend">{legend}</div>\n{svg(chart)}\n</figure>'


def svg(chart: Chart) -> str:
    lines = [Line(line.name, thin(line.points), line.colour, line.faint) for line in chart.lines]
    known = [(x, y) for line in lines for x, y in line.points if y is not None]
    start = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
    if not known:
        return f'{start}<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing recorded yet</text></svg>'
    # A faint line's outliers are cut off rather than let squash the line one reads.
    firm = [y for line in lines if not line.faint for _, y in line.points if y is not None] or [y for _, y in known]
    firm += [chart.mark[1]] if chart.mark else []
    below = min(firm) if chart.floor is None else min(chart.floor, *firm)
    heights = ticks(below, max(firm))
    low, high, end = heights[0], heights[-1], max(max(x for x, _ in known), 1.0)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def across(x: float) -> float:
        return LEFT + (right - LEFT) * x / end

    def up(y: float) -> float:
        return bottom - (bottom - TOP) * (min(max(y, low), high) - low) / (high - low)

    parts = [start]
    for y in heights:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{up(y) + 4:.1f}" text-anchor="end">{label(y)}</text>')
    for x in (t for t in ticks(0.0, end) if t <= end and t == round(t)):
        parts.append(f'<text x="{across(x):.1f}" y="{bottom + 17}" text-anchor="middle">{label(x)}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">update</text>')
    for line in lines:
        drawn = path([(across(x), None if y is None else up(y)) for x, y in line.points])
        kind = "faint" if line.faint else "firm"
        parts.append(f'<path class="{kind}" d="{drawn}" style="stroke: {line.colour}"/>')
        if len(line.points) <= FEW_POINTS and not line.faint:
            dots = [(across(x), up(y)) for x, y in line.points if y is not None]
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: {line.colour}"/>' for x, y in dots]
    if chart.mark:
        x, y = across(chart.mark[0]), up(chart.mark[1])
        side = "end" if x > WIDTH * 0.8 else "start" if x < WIDTH * 0.2 else "middle"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" style="fill: var(--orange)"/>')
        # Under the point: the best is the highest, so there is room below it and often none above.
        parts.append(f'<text class="mark" x="{x:.1f}" y="{y + 20:.1f}" text-anchor="{side}">{chart.mark[1]:.2f}</text>')
    return "\n".join([*parts, *columns(lines, across, bottom), "</svg>"])


def columns(lines: list[Line], across: Callable[[float], float], bottom: float) -> list[str]:
    """Upright strips that tell, under the pointer, what every line says there."""
    values: dict[float, list[str]] = {}
    for line in lines:
        for x, y in line.points:
            if y is not None:
                values.setdefault(x, []).append(f"{line.name} {y:.4g}")
    places = sorted(values)
    places = places[:: math.ceil(len(places) / MOST_COLUMNS)]
    centres = [across(x) for x in places]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(centres)]
    edges = [float(LEFT), *middles, float(WIDTH - RIGHT)]
    found = []
    for x, (left, right) in zip(places, itertools.pairwise(edges), strict=True):
        said = escape("\n".join([f"update {x:,.0f}", *values[x]]))
        box = f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP}"'
        found.append(f'<rect class="column" {box}><title>{said}</title></rect>')
    return found
