"""`redrafter tune`: finds the fastest tree shape on this machine and saves it as a profile that `load` uses."""

import argparse

from rich.table import Table

from redrafter.bounds import Count, NotNegative
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import RUNTIMES, add_target, find_drafter
from redrafter.cli.paths import InputFile
from redrafter.cli.progress import stages, waiting
from redrafter.config import Shape
from redrafter.questions import read_questions
from redrafter.tuning.profile import Profile, rows_label

EPILOG = """examples:
  redrafter tune
  redrafter tune --model my-model --drafter my-drafter --batch 1 4 16
Run nothing else on the machine meanwhile. The result is valid for this model, drafter, device, dtype and number of
threads."""

ESTIMATED_ROWS = 8
"""Shapes in the table that were only estimated."""


def add(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument("--drafter", default="auto", help="as for the other commands (default: auto)")
    group.add_argument("--runtime", default="auto", choices=RUNTIMES, help="(default: as for other commands)")
    add_value(
        parser, "--batch", tuple[Count, ...], default=[1], metavar="B", help="batch sizes to tune for (default 1)"
    )
    help_ = "sampling temperature of the texts (default 0)"
    add_value(parser, "--temperature", NotNegative, default=0.0, metavar="T", help=help_)
    add_value(parser, "--prompts", InputFile, help="JSON lines, as for redrafter eval (default: built-in prompts)")
    parser.add_argument("--quick", action="store_true", help="try fewer shapes and measure for a shorter time")


def run(args: argparse.Namespace) -> None:
    prompts = [question.text for question in read_questions(args.prompts)] if args.prompts else None
    find_drafter(args.drafter)
    from redrafter import load
    from redrafter.tuning.search import grid_for, tune
    from redrafter.tuning.store import save_profile

    console = Console()
    with waiting(console, "loading"):
        # Any explicit shape will do: without one, an older profile could replace the drafter by plain decoding.
        engine = load(
            args.model, args.drafter, dtype=args.dtype, device=args.device, runtime=args.runtime, shape=Shape()
        )
    with stages(console) as report:
        profile = tune(
            engine,
            row_counts=args.batch,
            temperature=args.temperature,
            prompts=prompts,
            grid=grid_for(engine.target, engine.drafter, args.runtime, args.quick),
            progress=report,
        )
    for best in profile.best_shapes:
        console.print(table(profile, best.rows))
    for best in profile.best_shapes:
        console.print(verdict(profile, best.rows))
    console.note(f"saved to {save_profile(profile)}")


def table(profile: Profile, rows: int) -> Table:
    """Measured shapes with plain decoding, then the best estimated shapes; the fastest first in each part."""
    made = Table(
        title=f"{profile.target_name}, {rows_label(rows)}, T={profile.temperature:g}",
        title_justify="left",
    )
    made.add_column("WxL:N")
    for column in ("tokens/step", "estimated ms/step", "measured ms/step", "tokens/s", "speedup"):
        made.add_column(column, justify="right")
    measured = {cost.shape: cost.ms for cost in profile.step_costs if cost.rows == rows}
    plain = profile.tokens_per_second(None, rows)

    def speed(shape: Shape | None) -> float:
        return profile.tokens_per_second(shape, rows)

    estimated = sorted((row.shape for row in profile.simulated if row.shape not in measured), key=speed, reverse=True)
    for shape in [*sorted(measured, key=speed, reverse=True), *estimated[:ESTIMATED_ROWS]]:
        made.add_row(
            "plain" if shape is None else shape.label,
            f"{profile.tokens_per_step(shape):.2f}",
            f"{profile.estimated_step_ms(shape, rows):.1f}",
            f"{measured[shape]:.1f}" if shape in measured else "",
            f"{speed(shape):.1f}",
            f"{speed(shape) / plain:.2f}×",
            style="bold green" if shape == profile.best_shape(rows) else None if shape in measured else "dim",
        )
    return made


def verdict(profile: Profile, rows: int) -> str:
    shape = profile.best_shape(rows)
    if shape is None:
        return f"{rows_label(rows)}: plain decoding is the fastest on this machine"
    speedup = profile.tokens_per_second(shape, rows) / profile.tokens_per_second(None, rows)
    return f"{rows_label(rows)}: {shape.label}, speedup {speedup:.2f}×"
