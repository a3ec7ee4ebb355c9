"""`redrafter compare`: plain and speculative decoding side by side, on the same prompts."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from redrafter.cli.options import add_model, add_sampling, as_prompt, load_engine, sampling_options
from redrafter.cli.show import coloured
from redrafter.results import check_new, write_results

if TYPE_CHECKING:
    from redrafter.engine import Engine
    from redrafter.engine.request import Part, Request, Stats
    from redrafter.engine.ties import Difference

EPILOG = """examples:
  redrafter compare
  redrafter compare --temperature 1 --seed 3 "Write a story about a lighthouse"
The two take turns in one process, each timed alone; whoever has used less time goes next."""

DEMO = (
    "Repeat this sentence five times, then translate it into French: The quick brown fox jumps over the lazy dog.",
    "Fix the spelling and give me back the whole text: The lighthous stood on the northen cliff. Every evning the "
    "keper climed the ninty steps, lit the lamp, and wached the ships go by. The lamp was older than the keper, and "
    "the keper was older than any ship that pased.",
    "Write a Python function that returns the n-th Fibonacci number, then the same function with a docstring.",
    "Why is the sky blue?",
)


@dataclass
class Side:
    """One contender on one prompt."""

    name: str
    parts: Iterator[list["Part"]]
    tokenizer: Any
    seconds: float = 0.0
    text: Text = field(default_factory=Text)
    tokens: list[int] = field(default_factory=list)
    stats: "Stats | None" = None
    done: bool = False

    def advance(self) -> None:
        """One step, timed alone."""
        began = time.perf_counter()
        parts = next(self.parts, None)
        self.seconds += time.perf_counter() - began
        if parts is None:
            self.done = True
            return
        for part in parts:
            self.text.append_text(coloured(part, self.tokenizer))
            self.tokens += part.tokens
            self.stats = part.stats

    def panel(self) -> Panel:
        rate = len(self.tokens) / self.seconds if self.seconds else 0.0
        per_step = f"{self.stats.tokens_per_step:.2f} tokens/step" if self.stats else ""
        title = f"{self.name}: {self.seconds:.1f} s, {rate:.1f} tokens/s, {per_step}"
        return Panel(self.text, title=title, width=None)


@dataclass(frozen=True)
class Outcome:
    """Both contenders on one prompt, finished."""

    prompt: str
    plain: Side
    speculative: Side
    difference: "Difference | None"

    def row(self) -> dict[str, Any]:
        stats = self.speculative.stats
        assert stats is not None
        return {
            "prompt": self.prompt,
            "tokens": len(self.plain.tokens),
            "steps": stats.steps,
            "tokens_per_step": stats.tokens_per_step,
            "plain_seconds": self.plain.seconds,
            "speculative_seconds": self.speculative.seconds,
            "speedup": self.plain.seconds / self.speculative.seconds,
            "equal": self.difference is None,
            "tie_gap": None if self.difference is None else self.difference.gap,
        }


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", help="prompts (default: four of our own)")
    parser.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace a file")
    add_model(parser)
    add_sampling(parser, max_new_tokens=64)


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    console = Console(highlight=False)
    options = sampling_options(args)
    with console.status("loading"):
        engine = load_engine(args)
        list(engine.run(engine.requests([[1, 2, 3]], max_new_tokens=4)))  # first passes warm up allocators and threads
    outcomes = []
    for prompt in args.prompts or DEMO:
        [request] = engine.requests([as_prompt(engine, prompt, args.raw)], **options)
        console.print(Text(f"\n{prompt}", style="bold"))
        outcomes.append(race(engine, request, prompt, console))
    console.print(summary(outcomes, console.width))
    console.print(verdict(outcomes, engine))
    if args.save:
        write_results(args.save, headline(outcomes), [o.row() for o in outcomes])
        console.print(f"[dim]written to {args.save}[/dim]")


def race(engine: "Engine", request: "Request", prompt: str, console: Console) -> Outcome:
    from redrafter.engine.ties import explain

    tokenizer = engine.target.tokenizer
    plain = Side("plain", engine.plain().run([request]), tokenizer)
    speculative = Side("speculative", engine.run([request]), tokenizer)
    sides = (plain, speculative)
    with Live(console=console, refresh_per_second=8, transient=not console.is_terminal) as live:
        while not all(s.done for s in sides):
            min((s for s in sides if not s.done), key=lambda s: s.seconds).advance()
            if console.is_terminal:
                live.update(Columns([s.panel() for s in sides], expand=True, equal=True))
    if not console.is_terminal:
        console.print(Group(*(s.panel() for s in sides)))
    return Outcome(prompt, plain, speculative, explain(engine.target, request, plain.tokens, speculative.tokens))


def headline(outcomes: list[Outcome]) -> dict[str, float]:
    tied = sum(o.difference is not None and o.difference.is_tie for o in outcomes)
    same = sum(o.difference is None for o in outcomes)
    stats = [o.speculative.stats for o in outcomes if o.speculative.stats]
    steps = sum(s.steps for s in stats)
    return {
        "tokens_per_step": sum(s.tokens - 1 for s in stats) / max(steps, 1),
        "speedup": sum(o.plain.seconds for o in outcomes) / sum(o.speculative.seconds for o in outcomes),
        "equal": (same + tied) / len(outcomes),
        "ties": tied,
    }


def summary(outcomes: list[Outcome], width: int) -> Table:
    table = Table(title="plain against speculative", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "steps", "tok/step", "plain s", "spec. s", "speedup", "text"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for o in outcomes:
        row = o.row()
        same = (
            "equal"
            if o.difference is None
            else f"{'tie' if o.difference.is_tie else 'DIFFERS'} at {o.difference.index}"
        )
        table.add_row(
            shortened(o.prompt, max(8, min(40, width - 72))),  # what the figures leave
            str(row["tokens"]),
            str(row["steps"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['plain_seconds']:.1f}",
            f"{row['speculative_seconds']:.1f}",
            f"{row['speedup']:.2f}×",
            same,
        )
    return table


def shortened(text: str, size: int) -> Text:
    return Text(text if len(text) <= size else text[: size - 1] + "…")


def verdict(outcomes: list[Outcome], engine: "Engine") -> str:
    h = headline(outcomes)
    equal = sum(o.difference is None for o in outcomes)
    line = (
        f"{h['tokens_per_step']:.2f} tokens/step, {h['speedup']:.2f}× as fast as plain decoding; "
        f"{equal} of {len(outcomes)} texts equal, {h['ties']:.0f} part at a numerical tie"
    )
    if not engine.rule_config.lossless:
        return f"{line} (the rule {engine.rule_config.name} is LOSSY: differences are expected)"
    if engine.rule_config.name == "rejection":
        return f"{line} (rejection keeps the distribution, not the tokens)"
    return line
