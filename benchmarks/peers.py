"""Medusa, EAGLE and the recurrent drafter with the same target, data, time, depth, vocabulary and parameter count.

    python benchmarks/texts.py --out DATA --answers ANSWERS --seconds 60 --at-once
    python benchmarks/peers.py --data DATA/tasks-0 DATA/tasks-1 DATA/free --answers ANSWERS --out RUNS --minutes 4 \\
        --at-once

DATA/... are folders made by texts.py or by `redrafter distill`. All drafters are trained by the same trainer with the
same loss; only the network and its learning rate differ. With `--minutes` each has the same time, in which its learning
rate falls to zero; `--at-once` trains all of them at the same time, in a process each, on the same GPU. RUNS/NAME then
holds the drafter with int8 matrices, like the drafter that comes with the package. tokens/step are simulated along the
target's answers to the questions (see tuning/simulate.py). `held_out` is the accuracy of each depth on held-out texts,
`learned_from` on training texts (arXiv v1, Figure 3). An interrupted run resumes.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/peers.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.answers import write_answers
from benchmarks.at_once import run_at_once
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.drafters import WithNgrams, checkpoint, files
from redrafter.drafters.load import load_drafter
from redrafter.drafters.options import DrafterOptions
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.texts import Texts, concatenate
from redrafter.train.config import TrainConfig
from redrafter.train.dataset import read_texts
from redrafter.train.trainer import Trained, train
from redrafter.tuning.simulate import simulate_batches, text_batches

DEPTH = 5
RECIPES: dict[str, tuple[DrafterOptions, float]] = {
    "medusa": (DrafterOptions(drafter="medusa", heads=DEPTH, exit_size=1024, blocks=2), 2e-3),
    "eagle": (DrafterOptions(drafter="eagle", exit_size=8192), 1e-3),
    "recurrent": (DrafterOptions(), 2e-3),
}
"""Options and learning rate of each drafter; each has about 16 million parameters."""
SHAPES = ("16x5:63", "4x4:7", "1x5")
NEVER = 10**9
"""Updates after which a run by time is evaluated and saved, besides at its end."""


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--questions", tiny.questions, "--data", tiny.texts, "--out", tiny.new_folder()]
    return [*words, "--width", 32, "--updates", 1, "--positions", 64, "--held-out", 2, "--max-new-tokens", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "peers.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of training texts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters")
    parser.add_argument("--answers", type=Path, help="folder of the answers to the questions (default: --out)")
    parser.add_argument("--drafters", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--minutes", type=float, help="train each drafter for this time, in place of --updates")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--texts", type=int, help="train on this many texts only (default: all)")
    parser.add_argument("--held-out", type=int, default=TrainConfig.held_out, help="texts kept out of training")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--width", type=int, help="exit size of the drafters (default: the recipe's)")
    parser.add_argument("--at-once", action=argparse.BooleanOptionalAction, default=False, help="a process per drafter")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    names = args.drafters
    if args.at_once:
        parts = {name: ["--drafters", name] for name in names}
        words = sys.argv[1:] if argv is None else argv
        rows, failed = run_at_once(__file__, words, parts, args.out / "logs")
        write_results(args.save, headline(rows), rows)
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        return
    target = load_target(args.model)
    texts = read_folders(args.data, target, args.texts)
    rows = []
    for name in names:
        rows.append(train_drafter(name, target, texts, args) | simulated(name, target, args))
        print(json.dumps(rows[-1]), flush=True)
        write_results(args.save, headline(rows), rows)


def read_folders(folders: Sequence[Path], target: Target, count: int | None = None) -> Texts:
    """The texts of several folders, or `count` of them, spread evenly."""
    texts = concatenate([read_texts(folder, target) for folder in folders])
    if count is None or count >= len(texts):
        return texts
    return texts.select(torch.arange(count) * len(texts) // count)


def time_or_updates(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a short training run, by time or by updates. It is evaluated once, at its end."""
    settings: dict[str, Any] = {
        "positions": args.positions,
        # Updates have about as many positions as asked for: one chunk has room for all of nearly every update.
        "chunk": -(-args.positions * 5 // 4) if torch.cuda.is_available() else None,
        "held_out": args.held_out,
        "patience": 0,
    }
    if args.minutes is not None:
        return settings | {"minutes": args.minutes, "evaluate_every": NEVER, "checkpoint_every": NEVER}
    updates = {"updates": args.updates, "warmup": args.updates // 8, "evaluate_every": args.updates}
    return settings | updates | {"checkpoint_every": max(1, args.updates // 4)}


def last_records(done: Trained) -> dict[str, Any]:
    """Accuracies on held-out texts and on training texts at the end of a training run."""
    return {
        "held_out": next(r["held_out"] for r in reversed(done.records) if "held_out" in r),
        "learned_from": next(r["accuracy"] for r in reversed(done.records) if "accuracy" in r),
    }


def train_drafter(name: str, target: Target, texts: Texts, args: argparse.Namespace) -> dict[str, Any]:
    """Train one drafter and write it to `--out`."""
    options, lr = RECIPES[name]
    if args.width:
        state = {"state_size": args.width} if options.drafter == "recurrent" else {}
        options = dataclasses.replace(options, exit_size=args.width, **state)
    config = TrainConfig(**time_or_updates(args) | {"depth": DEPTH, "lr": lr})
    began = time.perf_counter()
    done = train(target, texts, args.out / f".{name}", options=options, config=config, shape=Shape.of(SHAPES[0]))
    net, _ = checkpoint.read(args.out / f".{name}")
    checkpoint.write(args.out / name, net, target, overwrite=True, storage="int8")
    shutil.copy(args.out / f".{name}" / "journal.jsonl", args.out / name)
    row = {
        "drafter": name,
        "parameters": done.parameters,
        "updates": done.updates,
        "minutes": args.minutes,
        "positions": args.positions,
        "texts": len(texts),
        "seconds": round(time.perf_counter() - began, 1),
        "options": {k: v for k, v in dataclasses.asdict(options).items() if v is not None},
        "lr": lr,
        **last_records(done),
        "bytes": (args.out / name / files.WEIGHTS_FILE).stat().st_size,
    }
    print(json.dumps(row), flush=True)
    return row


def simulated(name: str, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """tokens/step along the answers."""
    row: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        answers = write_answers(target, args.questions, args.max_new_tokens, temperature, args.answers or args.out)
        drafter = load_drafter(args.out / name, target)
        batches = list(text_batches(target, drafter.layers, answers))
        for label in SHAPES:
            found = simulate_batches(batches, drafter, Shape.of(label))
            row[f"{label}, T={temperature:g}"] = round(found.tokens_per_step, 4)
            row[f"reached {label}, T={temperature:g}"] = [r / found.steps for r in found.reached]
        found = simulate_batches(batches, WithNgrams(drafter), Shape.of(SHAPES[0]))
        row[f"{SHAPES[0]}, n-grams, T={temperature:g}"] = round(found.tokens_per_step, 4)
    return row


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return tokens/step without n-grams, and the accuracy of the last depth on held-out texts."""
    found = {f"{r['drafter']}_tokens_per_step": r[f"{SHAPES[0]}, T=0"] for r in rows}
    return found | {f"{r['drafter']}_accuracy_{DEPTH}": round(r["held_out"]["accuracy"][-1], 4) for r in rows}


if __name__ == "__main__":
    main()
