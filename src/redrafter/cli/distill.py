"""`redrafter distill`: makes training data for a drafter. The target writes the texts."""

import argparse
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from rich.table import Table

from redrafter.cli.console import Console
from redrafter.cli.fields import add_fields, add_value, from_fields
from redrafter.cli.options import add_target
from redrafter.cli.paths import InputFile, OutputFolder
from redrafter.cli.progress import progress_bar, waiting
from redrafter.questions import read_questions
from redrafter.train.config import DistillConfig

if TYPE_CHECKING:
    from redrafter.targets import Target
    from redrafter.train.data_folder import Distilled
    from redrafter.train.text_plan import Clock

EPILOG = """examples:
  redrafter distill --out data
  redrafter distill --out data --prompts questions.jsonl --self-prompt --texts 20000
  redrafter distill --out data --local 5 --text book.txt

To resume a run that was stopped, give the same command again."""
MANY = 5_000
"""Texts that take a CPU hours."""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--out", OutputFolder, required=True, metavar="FOLDER", help="folder for the data")
    add_distill_options(parser)
    add_target(parser)


def add_distill_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The sources of the texts, and every field of DistillConfig except `without`."""
    group = parser.add_argument_group("data")
    add_value(
        group,
        "--prompts",
        InputFile,
        metavar="FILE",
        help="prompts to answer: JSON lines with 'turns', 'prompt' or 'conversations'",
    )
    group.add_argument(
        "--self-prompt",
        action="store_true",
        help="let the target write prompts too: all of them, or those missing from --prompts (default without a file)",
    )
    add_value(
        group,
        "--text",
        InputFile,
        metavar="FILE",
        help="use these texts as they are, with --local: .txt, or .jsonl with 'text'",
    )
    add_fields(group, DistillConfig, without=without)


def distill_sources(args: argparse.Namespace) -> dict[str, Any]:
    """The other arguments of `distill`."""
    from redrafter.train.local_rollouts import read_documents

    return {
        "prompts": [q.text for q in read_questions(args.prompts)] if args.prompts else None,
        "documents": read_documents(args.text) if args.text else None,
        "self_prompt": args.self_prompt or not (args.prompts or args.text),
    }


def run(args: argparse.Namespace) -> None:
    config, sources = from_fields(args, DistillConfig), distill_sources(args)
    from redrafter.targets import load_target

    console = Console()
    with waiting(console, "loading"):
        target = load_target(args.model, dtype=args.dtype, device=args.device)
    console.print(table(*make_texts(target, args.out, config, sources, console), args.out))


def make_texts(
    target: "Target",
    folder: Path,
    config: DistillConfig,
    sources: dict[str, Any],
    console: Console,
    clock: "Clock | None" = None,
) -> tuple["Distilled", float]:
    """Run `distill` behind a progress bar, with sizes that fit into the time of a clock.

    Returns the data and the tokens written per second.
    """
    from redrafter.train.distill import distill
    from redrafter.train.text_plan import plan_texts

    began, written = time.perf_counter(), 0
    if clock is not None:
        config = plan_texts(target, folder, config, clock.seconds, sources["self_prompt"])
        console.print(
            f"writing texts for {clock.seconds:.0f} s: {config.batch} at once, answers of at most "
            f"{config.max_new_tokens} tokens, {config.tasks} % tasks",
            soft_wrap=True,
        )
    given = sources["prompts"] or sources["documents"] or ()
    total = config.texts if sources["self_prompt"] else min(config.texts, len(given))
    if total >= MANY and clock is None and target.device.type == "cpu":
        line = f"{total} texts may take days on a CPU: give --texts N, or redrafter train --minutes N"
        console.print(line, style="yellow", soft_wrap=True)
    with progress_bar(console, *Progress.get_default_columns(), "{task.fields[speed]}") as bar:
        task = bar.add_task("writing texts", total=None if clock else total, speed="")

        def progress(rows: int, tokens: int) -> None:
            nonlocal written
            written += tokens
            speed = written / (time.perf_counter() - began)
            bar.update(task, advance=rows, speed=f"{written} tokens, {speed:.0f}/s" if written else "")

        made = distill(target, folder, config, **sources, progress=progress, clock=clock)
    return made, written / (time.perf_counter() - began)


def table(made: "Distilled", speed: float, folder: Path) -> Table:
    shown = Table(title="training data", title_justify="left", show_header=False)
    shown.add_row("texts", str(made.rows))
    shown.add_row("tokens", f"{made.tokens}, of them {made.answer_tokens} written by the target")
    for reason, count in sorted(made.dropped.items()):
        shown.add_row(f"dropped: {reason}", str(count))
    shown.add_row("tokens/s", f"{speed:.0f}" if speed else "nothing left to do")
    shown.add_row("folder", str(folder))
    return shown
