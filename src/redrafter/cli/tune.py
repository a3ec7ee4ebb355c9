"""`redrafter tune`: measures what steps cost on this machine and saves it as a profile that planners begin with."""

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from redrafter.bounds import Count, NotNegative
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import RUNTIMES, add_target, find_drafter
from redrafter.cli.paths import InputFile
from redrafter.cli.progress import stages, waiting
from redrafter.questions import read_questions

if TYPE_CHECKING:
    from redrafter.planning.costs import Costs

EPILOG = """examples:
  redrafter tune
  redrafter tune --model my-model --drafter my-drafter --batch 1 4 16
Run nothing else on the machine meanwhile. The result is valid for this model, drafter, device, dtype and number of
threads."""

TOKENS, QUICK_TOKENS = 96, 32
"""New tokens of a text."""


def add(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument("--drafter", default="auto", help="as for the other commands (default: auto)")
    group.add_argument("--runtime", default="auto", choices=RUNTIMES, help="(default: as for other commands)")
    add_value(parser, "--batch", tuple[Count, ...], default=[1], metavar="B", help="batch sizes to measure (default 1)")
    help_ = "sampling temperature of the texts (default 0)"
    add_value(parser, "--temperature", NotNegative, default=0.0, metavar="T", help=help_)
    add_value(parser, "--prompts", InputFile, help="JSON lines, as for redrafter eval (default: built-in prompts)")
    parser.add_argument("--quick", action="store_true", help="write shorter texts")


def run(args: argparse.Namespace) -> None:
    prompts = [question.text for question in read_questions(args.prompts)] if args.prompts else None
    find_drafter(args.drafter)
    from redrafter import load
    from redrafter.tuning.at_rest import tune
    from redrafter.tuning.store import save_profile

    console = Console()
    with waiting(console, "loading"):
        engine = load(args.model, args.drafter, dtype=args.dtype, device=args.device, runtime=args.runtime)
    with stages(console) as report:
        profile = tune(
            engine,
            row_counts=args.batch,
            temperature=args.temperature,
            prompts=prompts,
            tokens=QUICK_TOKENS if args.quick else TOKENS,
            progress=report,
        )
    assert engine.planner is not None
    console.print(table(profile.target_name, engine.planner.costs, engine.shape.width))
    console.note(f"saved to {save_profile(profile)}")


def table(name: str, costs: "Costs", width: int) -> Table:
    """The prices of passes over so many tokens, and of drafts of so many levels for one row."""
    made = Table(title=f"{name}, prices in ms", title_justify="left")
    made.add_column("")
    for column in (counts := [1, 2, 4, 8, 16, 32, 64, 128, 256]):
        made.add_column(str(column), justify="right")
    made.add_row("tokens of a pass", *(f"{1000 * costs.of_pass(n):.2f}" for n in counts))
    if costs.drafts.known:
        levels = [f"{1000 * costs.of_draft(1, width, n):.2f}" if n <= 8 else "" for n in counts]
        made.add_row("levels of a draft", *levels)
    return made
