"""What a long command shows while it works: a bar or a spinner in a terminal, elsewhere a plain line now and then."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from redrafter.cli.console import Console

EVERY = 10.0
"""Seconds between two plain lines."""


@contextlib.contextmanager
def plain_lines(console: Console, line: Callable[[], str]) -> Iterator[None]:
    """Print what `line` says, with the time since the start, every ten seconds where there is no terminal."""
    if console.is_terminal or console.quiet:
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk, which the command itself will meet
            while not over.wait(EVERY):
                console.print(Text(f"{line()}, {time.monotonic() - began:.0f} s"), soft_wrap=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A spinner beside the words for what goes on; call the result with other words."""
    with console.status(what) as shown, plain_lines(console, lambda: str(shown.status)):
        yield shown.update


@contextlib.contextmanager
def progress_bar(console: Console, *columns: str | ProgressColumn, transient: bool = False) -> Iterator[Progress]:
    """A bar for each task."""
    with (
        Progress(*columns, console=console, transient=transient) as bar,
        plain_lines(console, lambda: described(bar)),
    ):
        yield bar


def described(bar: Progress) -> str:
    """The tasks under way, in words.

    >>> bar = Progress()
    >>> _ = bar.add_task("reading", total=3), bar.add_task("writing", total=None, speed="5/s")
    >>> bar.update(TaskID(0), completed=2)
    >>> described(bar)
    'reading: 2 of 3; writing: 0, 5/s'
    """
    parts = []
    for task in bar.tasks:
        if not task.finished:
            total = "" if task.total is None else f" of {task.total:g}"
            fields = "".join(f", {value}" for value in task.fields.values() if value)
            parts.append(f"{task.description}: {task.completed:g}{total}{fields}")
    return "; ".join(parts) or "finishing"


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage: call the result with (stage, done, total). A new stage completes the others."""
    tasks: dict[str, TaskID] = {}
    with progress_bar(console, TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as bar:

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
