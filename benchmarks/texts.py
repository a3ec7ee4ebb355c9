"""Training texts for peers.py and ablations.py, and the target's answers along which both simulate tokens/step.

    python benchmarks/texts.py --out DATA --answers ANSWERS --seconds 60 --at-once

DATA/tasks-0 and DATA/tasks-1 hold texts of the usual recipe: half of the prompts set a task. DATA/free holds texts
without such prompts. The target writes all prompts itself. `--at-once` starts a process for each part, on the same GPU:
one process leaves the GPU idle while it prepares prompts. An interrupted run resumes.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/texts.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.answers import write_answers
from benchmarks.at_once import run_at_once
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.train.config import DistillConfig
from redrafter.train.distill import distill
from redrafter.train.text_plan import Clock

ANSWERS = "answers"
TEXTS = {"tasks-0": (50, 0), "tasks-1": (50, 1), "free": (0, 2)}
"""Percent of prompts that set a task, and the seed."""


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--questions", tiny.questions, "--prompts", tiny.questions]
    return [*words, "--out", tiny.new_folder(), "--answers", tiny.new_folder(), "--max-new-tokens", 4, "--batch", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "texts.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--out", type=Path, required=True, metavar="DATA", help="folder for the texts")
    parser.add_argument("--answers", type=Path, required=True, help="folder for the answers to the questions")
    parser.add_argument("--parts", nargs="+", default=[*TEXTS, ANSWERS], choices=[*TEXTS, ANSWERS])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each part (default 60)")
    parser.add_argument("--texts", type=int, default=100_000, help="most texts of each part (default 100000)")
    parser.add_argument("--shard", type=int, default=4096, help="texts in one file; a part has at least one")
    parser.add_argument("--batch", type=int, default=1024, help="texts that a process writes at once (default 1024)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--longest-prompt",
        type=int,
        default=768,
        help="skip longer prompts: EAGLE's training attends from every token to every token (default 768)",
    )
    parser.add_argument("--prompts", type=Path, help="answer these prompts instead of the target's own")
    parser.add_argument("--at-once", action=argparse.BooleanOptionalAction, default=False, help="a process per part")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    if args.at_once:
        parts = {name: ["--parts", name] for name in args.parts}
        words = sys.argv[1:] if argv is None else argv
        rows, failed = run_at_once(__file__, words, parts, args.out / "logs")
    else:
        target = load_target(args.model)
        rows, failed = [write_part(target, name, args) for name in args.parts], []
    write_results(args.save, headline(rows), rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def write_part(target: Target, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Write one folder of texts, or the answers."""
    began = time.perf_counter()
    row: dict[str, Any] = {"part": name}
    if name == ANSWERS:
        for temperature in (0.0, 1.0):
            texts = write_answers(target, args.questions, args.max_new_tokens, temperature, args.answers)
            row[f"answers at T={temperature:g}"] = len(texts)
    else:
        percent, seed = TEXTS[name]
        config = DistillConfig(
            texts=args.texts,
            max_new_tokens=args.max_new_tokens,
            longest_prompt=args.longest_prompt,
            tasks=percent,
            seed=seed,
            shard=args.shard,
            batch=args.batch,
        )
        prompts = [q.text for q in read_questions(args.prompts)] if args.prompts else None
        clock = None if args.seconds is None else Clock(args.seconds)
        made = distill(target, args.out / name, config, prompts=prompts, self_prompt=prompts is None, clock=clock)
        row |= {"tasks": percent, "seed": seed} | vars(made)
    row["seconds"] = round(time.perf_counter() - began, 1)
    print(row, flush=True)
    return row


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    written = [row for row in rows if "answer_tokens" in row]
    return {"texts": sum(r["rows"] for r in written), "answer_tokens": sum(r["answer_tokens"] for r in written)}


if __name__ == "__main__":
    main()
