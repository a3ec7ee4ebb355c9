"""The terminal display of `redrafter train`."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from redrafter.cli.console import Console
from redrafter.cli.progress import plain_lines
from redrafter.train.journal import Record, best

BARS = "▁▂▃▄▅▆▇█"


class LiveTraining:
    """A progress bar with the latest figures in a terminal; elsewhere a line per evaluation and every ten seconds.

    A resumed run passes the journal's `records`, so that the best value and the sparkline include earlier evaluations.
    """

    def __init__(self, total_updates: int, console: Console | None = None, records: Iterable[Record] = ()) -> None:
        self.console = console or Console()
        self.total = total_updates
        self.latest: Record = {}
        self.evaluations: list[Record] = [r for r in records if "held_out" in r]
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[dim]updates[/dim]"),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/dim]"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=300,  # long enough to average over the pauses for evaluations and checkpoints
        )
        self._task = self._progress.add_task("training", total=total_updates)
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4) if terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._lines = contextlib.ExitStack()
        self._lines.enter_context(plain_lines(self.console, self._now))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lines.close()
        if self._live:
            self._live.stop()

    def training(self, record: Record) -> None:
        self.latest = record
        self._progress.update(self._task, completed=record["update"])

    def held_out(self, record: Record) -> None:
        self.evaluations.append(record)
        if not self._live:
            self._print("  ".join(f"{name} {value}" for name, value in self._line(record) if value))

    def planned(self, updates: int) -> None:
        """Time decides how many there are; about so many."""
        self.total = updates
        self._progress.update(self._task, total=updates)

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _now(self) -> str:
        shown = "  ".join(f"{name} {value}" for name, value in self._training() if value)
        return f"training: update {self.latest.get('update', 0)} of {self.total}" + (f", {shown}" if shown else "")

    def _line(self, record: Record) -> list[tuple[str, str]]:
        update = f"{record['update']}/{self.total}"
        held_out = record["held_out"]
        return [
            ("update", update),
            *self._training(),
            ("held-out tokens/step", figure(held_out.get("tokens_per_step"))),
            ("accuracy", by_depth(held_out.get("accuracy"))),
            ("best", self._best()),
        ]

    def _training(self) -> list[tuple[str, str]]:
        return [
            ("loss", figure(self.latest.get("loss"), ".3f")),
            ("accuracy", by_depth(self.latest.get("accuracy"))),
            ("lr", figure(self.latest.get("lr"), ".2e")),
            ("positions/s", figure(self.latest.get("positions_per_second"), ",.0f")),
        ]

    def _best(self) -> str:
        found = best(self.evaluations)
        return f"{found[1]:.2f} at update {found[0]}" if found else ""

    def _render(self) -> RenderableType:
        """The progress bar, and below it one line about training data and one about held-out data."""
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("training", style="dim"), fields(self._training()))
        if self.evaluations:
            values = [r["held_out"].get("tokens_per_step") for r in self.evaluations]
            now = fields(
                [
                    ("tokens/step", figure(values[-1])),
                    ("accuracy", by_depth(self.evaluations[-1]["held_out"].get("accuracy"))),
                    ("best", self._best()),
                ]
            )
            table.add_row(Text("held out", style="dim"), now.append("  ").append(sparkline(values), style="cyan"))
        return Group(self._progress, table) if self.latest or self.evaluations else self._progress


def fields(pairs: Sequence[tuple[str, str]]) -> Text:
    """Names in dim text with their values. A value that is not known yet is left out, with its name."""
    shown = [Text.assemble((f"{name} ", "dim"), value) for name, value in pairs if value]
    return Text("  ").join(shown)


def figure(value: Any, form: str = ".2f") -> str:
    """
    >>> figure(2.345), figure(None), figure(float("nan"))
    ('2.35', '', 'nan')
    """
    return "" if value is None else f"{value:{form}}"


def by_depth(values: Sequence[float | None] | None, most: int = 6) -> str:
    """
    >>> by_depth([0.62, 0.45, None])
    '0.62 0.45 –'
    """
    shown = ["–" if v is None else f"{v:.2f}" for v in (values or ())]
    return " ".join(shown[:most] + ["…"] * (len(shown) > most))


def sparkline(values: Sequence[float | None], width: int = 32) -> str:
    """The last `width` values as bars, scaled from the lowest to the highest of them.

    >>> sparkline([1.0, 1.5, None, 2.0])
    '▁▅█'
    """
    known = [v for v in values if v is not None and math.isfinite(v)][-width:]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in known)
