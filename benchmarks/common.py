"""What the benchmark scripts share: questions, and where results go."""

import argparse
from pathlib import Path

from redrafter.questions import read_questions

HERE = Path(__file__).parent
QUESTIONS = HERE / "data" / "mt_bench.jsonl"


def first_turns(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Questions spread evenly over a file, as chat messages."""
    return [[{"role": "user", "content": q.text}] for q in read_questions(file, count)]


def arguments(description: str, result: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="a question file in Spec-Bench's form")
    parser.add_argument("--save", type=Path, default=HERE / "results" / result, help="where the JSON goes")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    return parser
