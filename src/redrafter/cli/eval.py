"""`redrafter eval`: measures how well a drafter predicts the target, for several shapes and temperatures."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from redrafter.bounds import Count, NotNegative
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import add_model, as_prompt, load_engine
from redrafter.cli.paths import InputFile, OutputFile
from redrafter.cli.progress import progress_bar, waiting
from redrafter.config import Shape
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results

if TYPE_CHECKING:
    from redrafter.train.evaluate import DraftQuality

EPILOG = """example:
  redrafter eval --questions benchmarks/data/mt_bench.jsonl --limit 8 --shapes 1x4 3x4:7 --temperatures 0 1"""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser, "--questions", InputFile, required=True, help="JSON lines with 'turns', 'prompt' or 'conversations'"
    )
    add_value(parser, "--limit", Count, metavar="K", help="use only K questions, spread evenly over the file")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="WxL[:N]",
        help="beam width x length : node budget (default: the drafter's default shape)",
    )
    add_value(
        parser,
        "--temperatures",
        tuple[NotNegative, ...],
        default=[0.0],
        metavar="T",
        help="sampling temperatures (default 0)",
    )
    help_ = "maximum length of an answer (default 128)"
    add_value(parser, "--max-new-tokens", Count, default=128, metavar="M", help=help_)
    add_value(parser, "--seed", int, default=0, help="sampling seed for temperatures above 0 (default 0)")
    add_value(parser, "--batch", Count, default=8, metavar="B", help="answers decoded together (default 8)")
    parser.add_argument("--raw", action="store_true", help="use questions as they are, without the chat template")
    add_value(parser, "--save", OutputFile, help="write the results as JSON")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace an existing file")
    add_model(parser)


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    questions = read_questions(args.questions, args.limit)
    shapes = [Shape.of(text) for text in args.shapes or ()]
    from redrafter.train.evaluate import evaluate

    console = Console()
    with waiting(console, "loading"):
        # Planned steps may decode plainly, and then there would be nothing to evaluate.
        engine = load_engine(args, adapts=False)
    shapes = shapes or [engine.shape]
    prompts = [as_prompt(engine, question.text, args.raw) for question in questions]
    categories = [question.category for question in questions]
    rows: list[DraftQuality] = []
    with progress_bar(console) as bar:
        task = bar.add_task("answering", total=len(questions) * len(shapes) * len(args.temperatures))
        for temperature in args.temperatures:
            requests = engine.requests(
                prompts, max_new_tokens=args.max_new_tokens, temperature=temperature, seed=args.seed
            )
            rows += evaluate(engine, requests, categories, shapes, args.batch, lambda n: bar.advance(task, n))
    console.print(table(rows))
    if args.save:
        write_results(args.save, headline(rows), [as_row(row) for row in rows])
        console.note(f"written to {args.save}")


def as_row(quality: "DraftQuality") -> dict[str, Any]:
    return asdict(quality) | {
        "shape": quality.shape.label,
        "tokens_per_step": quality.tokens_per_step,
        "acceptance": quality.acceptance,
        "nodes_per_step": quality.nodes_per_step,
    }


def headline(rows: list["DraftQuality"]) -> dict[str, float]:
    """tokens/step over all categories, for each shape and temperature."""
    totals = [row for row in rows if row.category == "all"] or rows
    return {f"{row.shape.label}, T={row.temperature:g}": row.tokens_per_step for row in totals}


def table(rows: list["DraftQuality"]) -> Table:
    made = Table(title="draft quality", title_justify="left")
    for column in ("T", "WxL:N", "category", "answers", "tokens/step", "nodes/step", "accepted by depth"):
        made.add_column(column, justify="left" if column in ("category", "accepted by depth") else "right")
    for row in rows:
        made.add_row(
            f"{row.temperature:g}",
            row.shape.label,
            row.category,
            str(row.answers),
            f"{row.tokens_per_step:.2f}",
            f"{row.nodes_per_step:.1f}",
            " ".join("–" if rate is None else f"{rate:.2f}" for rate in row.acceptance),
        )
    return made
