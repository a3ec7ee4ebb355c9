"""How text and figures look in a terminal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from redrafter.engine import Engine
from redrafter.engine.request import Part, Stats

DRAFTED = "green"


def coloured(part: Part, tokenizer: Any) -> Text:
    """What a step added: the drafter's tokens in colour, the target's own in the terminal's."""
    drafted = tokenizer.decode(part.tokens[: part.accepted], skip_special_tokens=True) if part.accepted else ""
    if not part.text.startswith(drafted):  # held-back text shifted the seam; colour by length instead
        drafted = part.text[: len(drafted)]
    return Text.assemble((drafted, DRAFTED), part.text[len(drafted) :])


def awaited(parts: Iterator[Part], engine: Engine, console: Console) -> Iterator[Part]:
    """The same parts, with a word on the wait for the first one: a GPU's first use takes a while."""
    compiles = engine.recorded and engine.runtime != "graphs"
    why = "reading; the first use compiles for a minute or two (--runtime graphs: seconds, a little slower)"
    with console.status(why if compiles else "reading"):
        first = next(parts, None)
    if first is not None:
        yield first
        yield from parts


def figures(stats: Stats) -> str:
    if not stats.steps:
        return "one token, with the prompt's own pass"
    line = (
        f"{stats.tokens} tokens in {stats.steps} steps, {stats.tokens_per_step:.2f} tokens/step, "
        f"{stats.tokens_per_second:.1f} tokens/s"
    )
    return line if stats.lossless else f"{line}, LOSSY rule {stats.rule}"


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Report what is done, how far it is and of how much: a bar for each stage, full when the next begins."""
    tasks: dict[str, TaskID] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:

        def fill() -> None:
            for task in tasks.values():
                bar.update(task, completed=bar.tasks[task].total)

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                fill()
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield report
        fill()
