"""`redrafter eval`: how well a drafter guesses, over a grid of shapes and temperatures."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from redrafter.cli.options import add_model, as_prompt, load_engine
from redrafter.config import SamplingParams, Shape, check_text_options
from redrafter.errors import ConfigError
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results

if TYPE_CHECKING:
    from redrafter.train.evaluate import Guessing

EPILOG = """example:
  redrafter eval --questions benchmarks/data/mt_bench.jsonl --limit 8 --shapes 1x4 3x4:7 --temperatures 0 1"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--questions", type=Path, required=True, help="JSON lines with 'turns', 'prompt' or 'conversations'"
    )
    parser.add_argument("--limit", type=int, metavar="K", help="only K questions, spread evenly over the file")
    parser.add_argument(
        "--shapes", nargs="+", metavar="WxL[:N]", help="beam width x length : node budget (default: the drafter's own)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], metavar="T", help="(default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M", help="per answer (default 128)")
    parser.add_argument("--seed", type=int, default=0, help="of the answers at temperatures above 0 (default 0)")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="answers written at once (default 8)")
    parser.add_argument("--raw", action="store_true", help="give questions as they are, without the chat template")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace a file")
    add_model(parser)


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    check_text_options(args.max_new_tokens)
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature)
    questions = read_questions(args.questions, args.limit)
    shapes = [Shape.of(text) for text in args.shapes or ()]
    from redrafter.train.evaluate import evaluate

    console = Console(highlight=False)
    with console.status("loading"):
        engine = load_engine(args, tuned=False)  # a drafter is judged even where plain decoding is faster
    shapes = shapes or [engine.shape]
    prompts = [as_prompt(engine, q.text, args.raw) for q in questions]
    rows: list[Guessing] = []
    with Progress(console=console) as bar:
        task = bar.add_task("answering", total=len(questions) * len(shapes) * len(args.temperatures))
        for temperature in args.temperatures:
            requests = engine.requests(
                prompts, max_new_tokens=args.max_new_tokens, temperature=temperature, seed=args.seed
            )
            rows += evaluate(
                engine, requests, [q.category for q in questions], shapes, args.batch, lambda n: bar.advance(task, n)
            )
    console.print(table(rows))
    if args.save:
        write_results(args.save, headline(rows), [as_row(r) for r in rows])
        console.print(f"[dim]written to {args.save}[/dim]")


def as_row(guessing: "Guessing") -> dict[str, Any]:
    return asdict(guessing) | {
        "shape": guessing.shape.label,
        "tokens_per_step": guessing.tokens_per_step,
        "acceptance": guessing.acceptance,
        "nodes_per_step": guessing.nodes_per_step,
    }


def headline(rows: list["Guessing"]) -> dict[str, float]:
    """tokens/step over all categories, per shape and temperature."""
    whole = [r for r in rows if r.category == "all"] or rows
    return {f"{r.shape.label}, T={r.temperature:g}": r.tokens_per_step for r in whole}


def table(rows: list["Guessing"]) -> Table:
    made = Table(title="guessing", title_justify="left")
    for column in ("T", "WxL:N", "category", "answers", "tokens/step", "nodes/step", "accepted by depth"):
        made.add_column(column, justify="left" if column in ("category", "accepted by depth") else "right")
    for r in rows:
        made.add_row(
            f"{r.temperature:g}",
            r.shape.label,
            r.category,
            str(r.answers),
            f"{r.tokens_per_step:.2f}",
            f"{r.nodes_per_step:.1f}",
            " ".join("–" if a is None else f"{a:.2f}" for a in r.acceptance),
        )
    return made
