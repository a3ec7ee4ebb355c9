"""What every page that we write has in common: one file, no network, light and dark; scales, labels, lines."""

import math
from html import escape
from pathlib import Path
from typing import Any

Point = tuple[float, float | None]  # x, value; None is a gap in the line

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c1e21; --soft: #686d75; --line: #e5e6e8;
  --blue: #2563c9; --orange: #c4570c; --l: 45%; }
@media (prefers-color-scheme: dark) { :root { --page: #131416; --card: #1b1d20; --ink: #e9eaec; --soft: #9ba1aa;
  --line: #2f3237; --blue: #6ea8ff; --orange: #f59a52; --l: 66%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 70rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.lead { color: var(--soft); margin: .2rem 0 1.6rem; } .lead b { color: var(--ink); }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: .9rem 1rem .5rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; } figcaption span { font-weight: 400; color: var(--soft); }
.legend { color: var(--soft); font-size: .85rem; min-height: 1.5em; }
.legend span { margin-right: .9em; white-space: nowrap; }
.legend i { display: inline-block; width: 1em; height: 3px; border-radius: 2px; margin-right: .4em;
  vertical-align: middle; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 12px; }
@media (max-width: 30rem) { svg { font-size: 16px; } }
svg text { fill: var(--soft); } svg .grid { stroke: var(--line); } svg .mark { fill: var(--ink); font-weight: 600; }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .faint { opacity: .3; stroke-width: 1; }
svg .column { fill: var(--ink); opacity: 0; } svg .column:hover { opacity: .09; }
table { border-collapse: collapse; margin-bottom: 1rem; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
"""


def document(title: str, body: str, footer: str) -> str:
    """A whole page, well-formed as XML too; `body` and `footer` are markup already."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)} · redrafter</title><style>{STYLE}</style></head><body>
{body}
<footer>{footer}</footer></body></html>
"""


def write_page(path: Path, content: str) -> None:
    """All or nothing."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(content, encoding="utf-8")
    scratch.replace(path)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from at or below `low` to at or above `high`.

    >>> ticks(0.0, 0.62), ticks(1.0, 2.81)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [1.0, 1.5, 2.0, 2.5, 3.0])
    """
    if high <= low:
        high = low + (abs(low) / 10 or 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


def label(value: float) -> str:
    """
    >>> label(0.25), label(12000.0), label(2e-4), label(0.0), label(1500000.0)
    ('0.25', '12k', '2e-4', '0', '1.5M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def path(points: list[Point]) -> str:
    """SVG's commands for a line with gaps; a point alone becomes a dot.

    >>> path([(0, 5), (10, 4), (20, None), (30, 3)])
    'M0.0 5.0L10.0 4.0M30.0 3.0h0'
    """
    found: list[str] = []
    length = 0
    for x, y in [*points, (0.0, None)]:
        if y is None:
            found += ["h0"] * (length == 1)
            length = 0
        else:
            found.append(f"{'L' if length else 'M'}{x:.1f} {y:.1f}")
            length += 1
    return "".join(found)


def text(value: Any) -> str:
    """
    >>> text(2.81234), text(1234567), text([0.62, None]), text("1e3")
    ('2.812', '1,234,567', '0.62 –', '1e3')
    """
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return " ".join(text(v) for v in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)
