"""What the benchmark scripts share: questions, and where results go."""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent
QUESTIONS = HERE / "data" / "mt_bench.jsonl"


def first_turns(file: Path, count: int) -> list[list[dict[str, str]]]:
    """The first turn of questions spread evenly over a file in Spec-Bench's form, as chat messages."""
    questions = [json.loads(line) for line in file.read_text().splitlines()]
    step = max(1, len(questions) // count)
    return [[{"role": "user", "content": q["turns"][0]}] for q in questions[::step][:count]]


def arguments(description: str, result: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="a question file in Spec-Bench's form")
    parser.add_argument("--save", type=Path, default=HERE / "results" / result, help="where the JSON goes")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    return parser
