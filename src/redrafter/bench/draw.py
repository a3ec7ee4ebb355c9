"""Charts of a report as SVG: bars, points, lines and a heat map, each in a figure with title and legend."""

from collections.abc import Mapping, Sequence
from html import escape

from redrafter.page import label, path, ticks

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 42
Values = Mapping[str, float | None]


def colour(index: int, count: int) -> str:
    """Return one of `count` evenly spaced hues, for light and dark mode."""
    return f"hsl({(215 + 360 * index / max(count, 1)) % 360:.0f}, 60%, var(--l))"


def figure(title: str, hint: str, drawing: str, legend: Sequence[str] = ()) -> str:
    """Wrap a chart in a figure; a chart wider than usual gets its own row."""
    names = " ".join(
        f'<span><i style="background: {colour(i, len(legend))}"></i>{escape(name)}</span>'
        for i, name in enumerate(legend)
    )
    caption = f"<figcaption>{escape(title)} <span>{escape(hint)}</span></figcaption>"
    kind = "" if f'viewBox="0 0 {WIDTH} ' in drawing else ' class="wide"'
    return f'<figure{kind}>{caption}<div class="legend">{names}</div>\n{drawing}\n</figure>'


class Frame:
    """Axes with rounded limits, and the SVG elements drawn in them."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x_name: str, width: int = WIDTH) -> None:
        self.width = width
        self.x, self.y = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
        self.parts = [f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">']
        for y in self.y:
            at = self.up(y)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{label(y)}</text>')
        self.parts.append(f'<text x="{width / 2}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')

    def across(self, x: float) -> float:
        low, high = self.x[0], self.x[-1]
        return LEFT + (self.width - LEFT - RIGHT) * (x - low) / (high - low)

    def up(self, y: float) -> float:
        low, high = self.y[0], self.y[-1]
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (min(max(y, low), high) - low) / (high - low)

    def number_x(self, only: Sequence[float] | None = None) -> None:
        for x in self.x if only is None else only:
            place = f'x="{self.across(x):.1f}" y="{HEIGHT - BOTTOM + 17}"'
            self.parts.append(f'<text {place} text-anchor="middle">{label(x)}</text>')

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"])


def bars(groups: Mapping[str, Values], names: Sequence[str], line: float | None = None) -> str:
    """Draw a group of bars per category with a bar per contender; `line` is a reference level."""
    values = [v for group in groups.values() for v in group.values() if v is not None]
    if not values:
        return nothing()
    width = max(WIDTH, LEFT + RIGHT + len(groups) * (14 * len(names) + 22))
    frame = Frame([0, 1], [0.0, max([*values, line or 0.0])], "", width)
    room = (width - LEFT - RIGHT) / len(groups)
    bar = min(22.0, (room - 12) / max(1, len(names)))
    for g, (category, group) in enumerate(groups.items()):
        start = LEFT + g * room + (room - bar * len(names)) / 2
        for i, name in enumerate(names):
            value = group.get(name)
            if value is None:
                continue
            top = frame.up(value)
            box = f'x="{start + i * bar:.1f}" y="{top:.1f}" width="{bar - 1.5:.1f}" height="{frame.up(0) - top:.1f}"'
            said = escape(f"{category}, {name}: {value:.3g}")
            frame.parts.append(f'<rect {box} style="fill: {colour(i, len(names))}"><title>{said}</title></rect>')
        middle = LEFT + (g + 0.5) * room
        frame.parts.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{escape(category)}</text>'
        )
    if line is not None:
        at = frame.up(line)
        frame.parts.append(
            f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" style="stroke: var(--ink)"/>'
        )
    return frame.done()


def points(
    places: Mapping[str, tuple[float, float, float | None, float | None]],
    names: Sequence[str],
    x_name: str,
) -> str:
    """Draw contenders at (x, speedup) with intervals; on the diagonal, speedup equals tokens/step."""
    if not places:
        return nothing()
    xs = [1.0, *(p[0] for p in places.values())]
    ys = [0.0, 1.0, *(v for p in places.values() for v in p[1:] if v is not None)]
    frame = Frame(xs, ys, x_name)
    frame.number_x()
    low, high = frame.x[0], min(frame.x[-1], frame.y[-1])
    corners = [(frame.across(v), frame.up(v)) for v in (low, high)]
    frame.parts.append(f'<path class="faint" d="{path([(x, y) for x, y in corners])}" style="stroke: var(--ink)"/>')
    for name, (x, y, below, above) in places.items():
        fill = colour(names.index(name), len(names))
        at = frame.across(x)
        if below is not None and above is not None:
            ends = f'y1="{frame.up(below):.1f}" y2="{frame.up(above):.1f}"'
            frame.parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" {ends} style="stroke: {fill}; stroke-width: 2"/>')
        said = escape(f"{name}: {x_name} {x:.3g}, speedup {y:.2f}")
        frame.parts.append(
            f'<circle cx="{at:.1f}" cy="{frame.up(y):.1f}" r="5" style="fill: {fill}"><title>{said}</title></circle>'
        )
    return frame.done()


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], names: Sequence[str], x_name: str) -> str:
    """Draw a curve per name."""
    known = [p for curve in curves.values() for p in curve]
    if not known:
        return nothing()
    frame = Frame([x for x, _ in known], [0.0, *(y for _, y in known)], x_name)
    frame.number_x(sorted({x for x, _ in known}) if len({x for x, _ in known}) <= 12 else None)
    for name, curve in curves.items():
        stroke = colour(names.index(name), len(names))
        drawn = path([(frame.across(x), frame.up(y)) for x, y in curve])
        frame.parts.append(f'<path d="{drawn}" style="stroke: {stroke}"/>')
        for x, y in curve:
            said = escape(f"{name}, {label(x)}: {y:.3g}")
            frame.parts.append(
                f'<circle cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}" r="3.5" style="fill: {stroke}">'
                f"<title>{said}</title></circle>"
            )
    return frame.done()


def heat(cells: Mapping[tuple[str, str], float], x_name: str, y_name: str) -> str:
    """Draw values by (column, row); larger values are darker."""
    if not cells:
        return nothing()
    columns, rows = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    low, high = min(cells.values()), max(cells.values())
    wide, tall = (WIDTH - LEFT - RIGHT) / len(columns), (HEIGHT - BOTTOM - TOP) / len(rows)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">']
    for (column, row), value in cells.items():
        x, y = LEFT + columns.index(column) * wide, TOP + rows.index(row) * tall
        share = (value - low) / (high - low or 1.0)
        said = escape(f"{x_name} {column}, {y_name} {row}: {value:.4g}")
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{tall - 2:.1f}" '
            f'style="fill: var(--blue); fill-opacity: {0.08 + 0.72 * share:.2f}"><title>{said}</title></rect>'
        )
        parts.append(
            f'<text class="mark" x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle">'
            f"{value:.3g}</text>"
        )
    for column in columns:
        x = LEFT + (columns.index(column) + 0.5) * wide
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{escape(column)}</text>')
    for row in rows:
        y = TOP + (rows.index(row) + 0.5) * tall + 4
        parts.append(f'<text x="{LEFT - 7}" y="{y:.1f}" text-anchor="end">{escape(row)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    return "\n".join([*parts, "</svg>"])


def nothing() -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing measured</text></svg>'
    )
