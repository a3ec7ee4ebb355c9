"""`redrafter compare`: plain and speculative decoding side by side, on the same prompts."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import add_model, add_sampling, as_prompt, load_engine, sampling_options
from redrafter.cli.paths import OutputFile
from redrafter.cli.progress import plain_lines, waiting
from redrafter.cli.show import coloured
from redrafter.results import check_new, write_results

if TYPE_CHECKING:
    from redrafter.engine import Engine
    from redrafter.engine.exactness import Exactness
    from redrafter.engine.request import Part, Request, Stats
    from redrafter.engine.ties import Difference

EPILOG = """examples:
  redrafter compare
  redrafter compare --temperature 1 --seed 3 "Write a story about a lighthouse"
Plain and speculative decoding take turns in one process and are timed separately. Compilation and other first-use
work is done before the clock starts."""

DEMO_PROMPTS = (
    "Repeat this sentence five times, then translate it into French: The quick brown fox jumps over the lazy dog.",
    "Fix the spelling and give me back the whole text: The lighthous stood on the northen cliff. Every evning the "
    "keper climed the ninty steps, lit the lamp, and wached the ships go by. The lamp was older than the keper, and "
    "the keper was older than any ship that pased.",
    "Write a Python function that returns the n-th Fibonacci number, then the same function with a docstring.",
    "Why is the sky blue?",
)
EAGER_WARM_UP = 3
"""Untimed steps where nothing is compiled: they start threads and fill memory allocators."""

SECONDS_PER_DRAWING = 1 / 8

clock = time.perf_counter


@dataclass
class TimedRun:
    """One request, decoded step by step, with the time that its own steps took."""

    name: str
    parts: Iterator[list["Part"]]
    tokenizer: Any
    synchronize: Callable[[], None]
    """Waits until the device has finished all launched work."""
    seconds: float = 0.0
    text: Text = field(default_factory=Text)
    tokens: list[int] = field(default_factory=list)
    stats: "Stats | None" = None
    done: bool = False

    def advance(self) -> None:
        """One step. The device is idle at the end, so that the other run does not pay for a step launched ahead."""
        began = clock()
        parts = next(self.parts, None)
        self.synchronize()
        self.seconds += clock() - began
        if parts is None:
            self.done = True
            return
        for part in parts:
            self.text.append_text(coloured(part, self.tokenizer))
            self.tokens += part.tokens
            self.stats = part.stats

    def panel(self) -> Panel:
        rate = len(self.tokens) / self.seconds if self.seconds else 0.0
        per_step = f", {self.stats.tokens_per_step:.2f} tokens/step" if self.stats else ""
        title = f"{self.name}: {self.seconds:.1f} s, {rate:.1f} tokens/s{per_step}"
        return Panel(self.text, title=title, width=None)


@dataclass(frozen=True)
class Comparison:
    """Both finished runs of one prompt."""

    prompt: str
    plain: TimedRun
    speculative: TimedRun
    difference: "Difference | None"
    """Where the two texts differ first; None if they are equal."""

    @property
    def exactness(self) -> "Exactness | None":
        """What both runs promise together."""
        from redrafter.engine.exactness import weakest

        return weakest(run.stats.exactness for run in (self.plain, self.speculative) if run.stats)

    @property
    def equality(self) -> Literal["equal", "tie", "DIFFERS"]:
        """Where the promise is bitwise, no difference is excused as a tie."""
        if self.difference is None:
            return "equal"
        return "tie" if self.difference.is_tie and self.exactness != "bitwise" else "DIFFERS"

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
            "exactness": self.exactness,
            "tie_gap": None if self.difference is None else self.difference.gap,
        }


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "prompts", str, nargs="*", metavar="PROMPT", help="prompts (default: four built-in prompts)")
    parser.add_argument("--raw", action="store_true", help="use prompts as they are, without the chat template")
    add_value(parser, "--save", OutputFile, help="write the results as JSON")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace an existing file")
    add_model(parser)
    add_sampling(parser, max_new_tokens=64)


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    console = Console()
    options = sampling_options(args)
    with waiting(console, "loading"):
        engine = load_engine(args)
    comparisons = []
    for prompt in args.prompts or DEMO_PROMPTS:
        [request] = engine.requests([as_prompt(engine, prompt, args.raw)], **options)
        console.print(Text(f"\n{prompt}", style="bold"))
        with waiting(console, "warming up; the first use on a GPU compiles for a minute or two"):
            warm_up(engine, request)
        comparisons.append(compare(engine, request, prompt, console))
    console.print(summary(comparisons, console.width))
    console.print(verdict(comparisons, engine))
    if args.save:
        write_results(args.save, headline(comparisons), [c.row() for c in comparisons])
        console.note(f"written to {args.save}")
    wrong = sum(c.equality != "equal" for c in comparisons if c.exactness == "bitwise")
    if wrong:
        line = f"ERROR: {wrong} of {len(comparisons)} texts differ although the exactness is bitwise"
        console.print(line, style="red", soft_wrap=True)
        raise SystemExit(1)


def warm_up(engine: "Engine", request: "Request") -> None:
    """Decode the request untimed, plainly and speculatively, so that the timed runs compile and record nothing.

    What is compiled depends on the length of the prompt, the cache size and the kind of sampling, and may depend on
    the length of the text. Where anything is compiled, the warm-up therefore decodes the same text to its end.
    """
    from redrafter.tuning.store import resolve_runtime

    eager = resolve_runtime(engine.target.device.type, engine.runtime) == "eager"
    for side in (engine.plain(), engine):
        for _ in islice(side.run([request]), EAGER_WARM_UP if eager else None):
            pass


def compare(engine: "Engine", request: "Request", prompt: str, console: Console) -> Comparison:
    """Decode a prompt twice, in turns. The run that has used less time so far takes the next step."""
    from redrafter.engine.ties import explain

    tokenizer, synchronize = engine.target.tokenizer, synchronizer(engine.target.device)
    plain = TimedRun("plain", engine.plain().run([request]), tokenizer, synchronize)
    speculative = TimedRun("speculative", engine.run([request]), tokenizer, synchronize)
    runs = (plain, speculative)
    # Drawn between steps, because a thread that draws would take its time from the steps.
    with (
        Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live,
        plain_lines(
            console, lambda: f"tokens so far: {len(plain.tokens)} plain, {len(speculative.tokens)} speculative"
        ),
    ):
        drawn = 0.0
        while not all(r.done for r in runs):
            min((r for r in runs if not r.done), key=lambda r: r.seconds).advance()
            over = all(r.done for r in runs)
            if console.is_terminal and (over or clock() - drawn > SECONDS_PER_DRAWING):
                live.update(Columns([r.panel() for r in runs], expand=True, equal=True), refresh=True)
                drawn = clock()
    if not console.is_terminal:
        console.print(Group(*(r.panel() for r in runs)))
    return Comparison(prompt, plain, speculative, explain(engine.target, request, plain.tokens, speculative.tokens))


def synchronizer(device: Any) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def headline(comparisons: list[Comparison]) -> dict[str, float]:
    tied = sum(c.equality == "tie" for c in comparisons)
    same = sum(c.equality == "equal" for c in comparisons)
    stats = [c.speculative.stats for c in comparisons if c.speculative.stats]
    steps = sum(s.steps for s in stats)
    return {
        "tokens_per_step": sum(s.tokens - 1 for s in stats) / max(steps, 1),
        "speedup": sum(c.plain.seconds for c in comparisons) / sum(c.speculative.seconds for c in comparisons),
        "equal": (same + tied) / len(comparisons),
        "ties": tied,
    }


def summary(comparisons: list[Comparison], width: int) -> Table:
    table = Table(title="plain and speculative decoding", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "steps", "tok/step", "plain s", "spec. s", "speedup", "text"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for c in comparisons:
        row = c.row()
        text = c.equality if c.difference is None else f"{c.equality} at {c.difference.index}"
        table.add_row(
            shortened(c.prompt, max(8, min(40, width - 72))),  # the other columns need 72 characters
            str(row["tokens"]),
            str(row["steps"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['plain_seconds']:.1f}",
            f"{row['speculative_seconds']:.1f}",
            f"{row['speedup']:.2f}×",
            text,
        )
    return table


def shortened(text: str, size: int) -> Text:
    return Text(text if len(text) <= size else text[: size - 1] + "…")


def verdict(comparisons: list[Comparison], engine: "Engine") -> str:
    figures = headline(comparisons)
    equal = sum(c.equality == "equal" for c in comparisons)
    stats = [c.speculative.stats for c in comparisons if c.speculative.stats]
    plain = sum(s.plain_steps for s in stats) / max(1, sum(s.steps for s in stats))
    notes = [f"{plain:.0%} of the steps verified no guess"] if plain else []
    if expected := sum(s.expected for s in stats):
        right = sum(s.accepted for s in stats)
        notes.append(f"{expected:.0f} of {sum(s.nodes for s in stats)} guesses were expected to be right, {right} were")
    without = f" ({'; '.join(notes)})" if notes else ""
    line = (
        f"speedup {figures['speedup']:.2f}×, {figures['tokens_per_step']:.2f} tokens/step{without}; "
        f"{equal} of {len(comparisons)} texts equal"
    )
    promised = [c for c in comparisons if c.exactness == "bitwise"]
    if len(promised) < len(comparisons):
        line += f", {figures['ties']:.0f} differ at a numerical tie"
    if any(c.exactness is not None for c in comparisons):
        line += f"; exactness {'bitwise' if len(promised) == len(comparisons) else 'ties'}"
    if not engine.rule_config.lossless:
        return f"{line} (the rule {engine.rule_config.name} is LOSSY: differences are expected)"
    if engine.rule_config.name == "rejection":
        return f"{line} (rejection preserves the distribution, not the tokens)"
    return line
