"""`redrafter bench run`: contenders answer the questions of a suite; their texts are compared. Runs can be resumed."""

import argparse
import hashlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from redrafter.bench.specs import CONTENDERS, REFERENCE, names_of, split_shape
from redrafter.bench.suites import SUITES, questions
from redrafter.bounds import Count, NotNegative
from redrafter.cli.bench_report import console_table
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import RUNTIMES, add_exact, add_target
from redrafter.cli.paths import OutputFile, OutputFolder
from redrafter.cli.progress import progress_bar, waiting
from redrafter.config import Shape
from redrafter.results import check_new, write_results

if TYPE_CHECKING:
    from redrafter.bench.contenders import Contender
    from redrafter.bench.runs import BenchmarkRun
    from redrafter.engine import Engine

QUICK = {
    "limit": 8,
    "max_new_tokens": 32,
    "turns": 1,
    "contenders": ["plain", "recurrent+ngram", "ngram", "transformers"],
}
DEFAULTS = {
    "limit": None,
    "max_new_tokens": 128,
    "turns": None,
    "contenders": ["plain", "recurrent+ngram", "recurrent", "ngram"],
}

EPILOG = (
    "contenders:\n"
    + "\n".join(f"  {name:14} {text}" for name, text in CONTENDERS.items())
    + "\n  With +ngram at the end (recurrent+ngram, medusa+ngram=FOLDER, ...), n-grams are mixed into the drafter."
    + "\n\nsuites:\n"
    + "\n".join(f"  {name:14} {text}" for name, (_, text) in SUITES.items())
    + """

examples:
  redrafter bench run --suite mt_bench --quick --out quick
  redrafter bench run --suite mt_bench --contenders recurrent medusa=FOLDER eagle=FOLDER --temperatures 0 1 --out table1
  redrafter bench run --suite spec_bench --contenders recurrent --shapes 3x3:5 4x4:7 8x4:15 --out grid

To resume a run that was stopped, give the same command again. Then: redrafter bench report FOLDER"""
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", required=True, help="a suite listed below, or a file of JSON lines with 'turns'")
    add_value(parser, "--out", OutputFolder, metavar="FOLDER", help="folder for the answers (default: bench-SUITE)")
    parser.add_argument("--quick", action="store_true", help="a few short answers: takes minutes on two cores")
    parser.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME[=X][@WxL:N]",
        help="see below (default: plain recurrent+ngram recurrent ngram; with --quick: plain recurrent+ngram ngram "
        "transformers)",
    )
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="WxL[:N]", help="a grid of shapes (default: each drafter's own)"
    )
    add_value(
        parser,
        "--temperatures",
        tuple[NotNegative, ...],
        default=[0.0],
        metavar="T",
        help="sampling temperatures (default 0)",
    )
    add_value(parser, "--batch", Count, default=1, metavar="B", help="questions answered at once (default 1)")
    add_value(parser, "--limit", Count, metavar="K", help="only K questions, spread evenly over the suite")
    add_value(parser, "--turns", Count, metavar="K", help="only the first K turns of each question")
    add_value(parser, "--max-new-tokens", Count, metavar="M", help="per answer (default 128)")
    help_ = "ask every question R times; times are medians"
    add_value(parser, "--rounds", Count, default=1, metavar="R", help=help_)
    add_value(parser, "--seed", int, default=0, help="seed of answers at temperatures above 0 (default 0)")
    parser.add_argument(
        "--runtime", default="auto", choices=RUNTIMES, help="(default: compiled on a GPU, eager on a CPU)"
    )
    add_value(parser, "--save", OutputFile, help="write the results as JSON too")
    parser.add_argument("--overwrite", action="store_true", help="allow --save to replace a file")
    add_exact(parser)
    add_target(parser)


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    shapes = [Shape.of(text) for text in args.shapes]
    names_of(args.contenders, shapes)
    asked = questions(args.suite, args.limit, args.turns)
    folder = args.out or Path(f"bench-{Path(args.suite).stem}")
    from redrafter.bench.contenders import PromptBatch
    from redrafter.bench.entries import TargetSetup, make
    from redrafter.bench.formats import export
    from redrafter.bench.report import markdown
    from redrafter.bench.runs import BenchmarkRun, RunConfig, digest
    from redrafter.bench.statistics import headline, summaries
    from redrafter.drafters.checkpoint import identity
    from redrafter.targets import load_target
    from redrafter.targets.default import default_model

    console = Console()
    with waiting(console, "loading"):
        target = load_target(args.model, dtype=args.dtype, device=args.device)
        setup = TargetSetup(target, args.model or str(default_model()), args.runtime, args.exact)
        contenders = make(setup, args.contenders, shapes)
    config = RunConfig(
        suite=args.suite if args.suite in SUITES else Path(args.suite).name,
        questions=digest([asdict(q) for q in asked]),
        model=identity(target),
        contenders=tuple(f"{spec} {weights_digest(spec)}".strip() for spec in args.contenders),
        shapes=tuple(s.label for s in shapes),
        temperatures=tuple(args.temperatures),
        max_new_tokens=args.max_new_tokens,
        batch=args.batch,
        rounds=args.rounds,
        seed=args.seed,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        runtime=args.runtime,
    )
    bench = BenchmarkRun(folder, config)
    engine = reference_engine(contenders)
    left_out = [c.name for c in contenders if config.batch > 1 and c.one_row]
    if left_out:
        console.note(f"left out, because they cannot answer a batch: {', '.join(left_out)}")
    with waiting(console, "warming up"):
        for contender in contenders:
            contender.answer(PromptBatch([engine.encode([{"role": "user", "content": "Hello!"}])], [0], 0.0, 4))
    watch(bench, contenders, asked, engine, console)
    export(folder, bench.records, target.name.replace("/", "-"), time.time())
    rows = summaries(bench.records, REFERENCE, by_category=True)
    (folder / "tables.md").write_text(markdown(rows), encoding="utf-8")
    if args.save:
        write_results(args.save, headline(rows, REFERENCE), rows)
    for table in console_table(rows):
        console.print(table)
    console.note(f"answers in {folder}; a page of them: redrafter bench report {folder}")


def watch(
    bench: "BenchmarkRun", contenders: list["Contender"], asked: list[Any], engine: "Engine", console: Console
) -> None:
    """Run all turns behind a progress bar."""
    total = len(bench.config.temperatures) * sum(
        max(len(q.turns) for q in asked[i : i + bench.config.batch]) for i in range(0, len(asked), bench.config.batch)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(console, *columns) as bar:
        task = bar.add_task("turns answered by every contender", total=total)
        for _ in bench.play(contenders, asked, engine):
            bar.advance(task)


def reference_engine(contenders: list["Contender"]) -> "Engine":
    from redrafter.bench.contenders import Ours

    first = contenders[0]
    assert isinstance(first, Ours)
    return first.engine


def weights_digest(spec: str) -> str:
    """A digest of the files that a contender names behind `=`: a folder with new weights is another contender."""
    path = Path(split_shape(spec)[0].partition("=")[2])
    if "=" not in spec or not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*")):
        if file.suffix in (".safetensors", ".json", ".gguf"):
            digest.update(file.name.encode() + str(file.stat().st_size).encode() + file.read_bytes()[:1_000_000])
    return digest.hexdigest()[:12]
