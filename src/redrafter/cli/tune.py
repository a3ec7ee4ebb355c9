"""`redrafter tune`: which shape is fastest on this machine, kept as a profile that `load` picks up."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from redrafter.cli.options import RUNTIMES, add_target, find_drafter
from redrafter.cli.show import stages
from redrafter.config import SamplingParams, Shape
from redrafter.errors import ConfigError
from redrafter.questions import read_questions

if TYPE_CHECKING:
    from redrafter.engine.profile import Profile

EPILOG = """examples:
  redrafter tune
  redrafter tune --model my-model --drafter my-drafter --batch 1 4 16
Leave the machine alone meanwhile. What is chosen holds for this model, drafter, device, dtype and number of threads."""

SHOWN = 8
"""Shapes in the table besides those measured whole."""


def add(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument("--drafter", default="auto", help="as for the other commands (default: auto)")
    group.add_argument("--runtime", default="auto", choices=RUNTIMES, help="(default: as for other commands)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="rows at once (default 1)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the texts (default 0)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines as eval takes them (default: some of our own)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter measurements")


def run(args: argparse.Namespace) -> None:
    SamplingParams(temperature=args.temperature)  # before a model is loaded for nothing
    if min(args.batch) < 1:
        raise ConfigError(f"--batch must be at least 1, got {min(args.batch)}")
    prompts = [q.text for q in read_questions(args.prompts)] if args.prompts else None
    find_drafter(args.drafter)
    from redrafter.engine import load
    from redrafter.engine.profile import save
    from redrafter.train.tune import plan_for, tune

    console = Console(highlight=False)
    with console.status("loading"):
        # A given shape, whichever: an older profile must not take the drafter away.
        engine = load(
            args.model, args.drafter, dtype=args.dtype, device=args.device, runtime=args.runtime, shape=Shape()
        )
    with stages(console) as report:
        profile = tune(
            engine.target,
            engine.drafter,
            runtime=engine.runtime,
            batches=args.batch,
            temperature=args.temperature,
            prompts=prompts,
            plan=plan_for(engine.target, engine.drafter, args.runtime, args.quick),
            progress=report,
        )
    for choice in profile.choices:
        console.print(table(profile, choice.batch))
    for choice in profile.choices:
        console.print(verdict(profile, choice.batch))
    console.print(f"[dim]kept in {save(profile)}[/dim]", soft_wrap=True)


def table(profile: "Profile", batch: int) -> Table:
    """Plain decoding, the shapes measured whole, and the best of the others; the fastest first."""
    from redrafter.train.tune import rows_of

    made = Table(title=f"{profile.name}, {rows_of(batch)}, T={profile.temperature:g}", title_justify="left")
    made.add_column("WxL:N")
    for column in ("tokens/step", "ms/step expected", "measured", "tokens/s", "speedup"):
        made.add_column(column, justify="right")
    measured = {s.shape: s.ms for s in profile.stepped if s.batch == batch}
    plain = profile.expected(None, batch)

    def rate(shape: Shape | None) -> float:
        return profile.expected(shape, batch)

    others = sorted((g.shape for g in profile.guessed if g.shape not in measured), key=rate, reverse=True)
    for shape in [*sorted(measured, key=rate, reverse=True), *others[:SHOWN]]:
        made.add_row(
            "plain" if shape is None else shape.label,
            f"{profile.tokens_per_step(shape):.2f}",
            f"{profile.expected_ms(shape, batch):.1f}",
            f"{measured[shape]:.1f}" if shape in measured else "",
            f"{rate(shape):.1f}",
            f"{rate(shape) / plain:.2f}×",
            style="bold green" if shape == profile.choose(batch) else None if shape in measured else "dim",
        )
    return made


def verdict(profile: "Profile", batch: int) -> str:
    from redrafter.train.tune import rows_of

    shape = profile.choose(batch)
    if shape is None:
        return f"{rows_of(batch)}: plain decoding; no guess pays on this machine"
    speedup = profile.expected(shape, batch) / profile.expected(None, batch)
    return f"{rows_of(batch)}: {shape.label}, {speedup:.2f}× as fast as plain decoding"
