"""Command-line options, questions and result paths that the benchmark scripts share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.smoke import TinyFiles
from redrafter.questions import read_questions

HERE = Path(__file__).parent
QUESTIONS = HERE / "data" / "mt_bench.jsonl"
SmokeOptions = Callable[[TinyFiles], Sequence[object]]
"""Returns the command-line words of a script's smoke run."""


def first_turns(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Return the first turns of `count` questions, spread evenly over a file, as chat messages."""
    return [[{"role": "user", "content": q.text}] for q in read_questions(file, count)]


def arguments(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with the options --questions, --save and --overwrite. `description` is the script's docstring."""
    parser = bare_arguments(description)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="question file in the Spec-Bench format")
    parser.add_argument("--save", type=Path, default=HERE / "results" / result, help="path of the results (JSON)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    return parser


def bare_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with no options. `description` is the script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, smoke: SmokeOptions) -> argparse.Namespace:
    """Parse the command line. With --smoke, the options of `smoke` replace the defaults.

    A smoke run uses tiny random models and writes its results to a temporary folder unless --save is given.
    """
    parser.add_argument("--smoke", action="store_true", help="run with one prompt, few tokens and tiny random models")
    words = list(sys.argv[1:] if argv is None else argv)
    if "--smoke" in words:
        tiny = TinyFiles.shared()
        default = parser.get_default("save")
        if isinstance(default, Path):
            parser.set_defaults(save=tiny.folder / default.name, overwrite=True)
        words = [*map(str, smoke(tiny)), *words]
    return parser.parse_args(words)
