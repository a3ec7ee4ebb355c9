"""How text and figures look in a terminal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from redrafter.engine import Engine
    from redrafter.engine.request import Part, Stats

DRAFTED = "green"


def coloured(part: "Part", tokenizer: Any) -> Text:
    """The text of a step, with the drafted tokens in colour."""
    drafted = tokenizer.decode(part.tokens[: part.accepted], skip_special_tokens=True) if part.accepted else ""
    if not part.text.startswith(drafted):  # text held back from an earlier step shifts the boundary: colour by length
        drafted = part.text[: len(drafted)]
    return Text.assemble((drafted, DRAFTED), part.text[len(drafted) :])


def awaited(parts: Iterator["Part"], engine: "Engine", console: Console) -> Iterator["Part"]:
    """The same parts, with a status line while the first one is computed: the first use of a GPU takes a while."""
    compiles = engine.recorded and engine.runtime != "graphs"
    why = "reading the prompt; the first use compiles for a minute or two (--runtime graphs: seconds, a little slower)"
    with console.status(why if compiles else "reading the prompt"):
        first = next(parts, None)
    if first is not None:
        yield first
        yield from parts


def figures(stats: "Stats") -> str:
    if not stats.steps:
        return "one token, from the prompt's own pass"
    plain = f" ({stats.plain_steps} plain)" if 0 < stats.plain_steps < stats.steps else ""
    line = (
        f"{stats.tokens} tokens in {stats.steps} steps{plain}, {stats.tokens_per_step:.2f} tokens/step, "
        f"{stats.tokens_per_second:.1f} tokens/s"
    )
    if not stats.lossless:
        return f"{line}, LOSSY rule {stats.rule}"
    return line if stats.exactness is None else f"{line}, exactness {stats.exactness}"


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage: call the result with (stage, done, total). A new stage completes the others."""
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
