"""Medusa, EAGLE and the recurrent drafter with the same target, data, updates, depth, vocabulary and parameter count.

    python benchmarks/peers.py --data DATA --out RUNS

`DATA` is a folder made by `redrafter distill`. All drafters are trained by the same trainer with the same loss; only
the network and its learning rate differ. RUNS/NAME then holds the drafter with int8 matrices, like the drafter that
comes with the package. tokens/step are simulated along the target's answers to the questions (see tuning/simulate.py).
`held_out` is the accuracy of each depth on held-out texts, `learned_from` on training texts (arXiv v1, Figure 3).
Several processes may share the work (`--drafters`), each with its own results file; benchmarks/gather.py merges them.
An interrupted run resumes.

`--drafters family` instead trains recurrent drafters of several sizes, with and without the RNN (arXiv v1, Figure 4);
benchmarks/family.py measures their speed.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/peers.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.answers import write_answers
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.drafters import checkpoint
from redrafter.drafters.load import load_drafter
from redrafter.drafters.options import DrafterOptions
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.train.config import TrainConfig
from redrafter.train.dataset import read_texts
from redrafter.train.trainer import train
from redrafter.tuning.simulate import simulate_batches, text_batches

DEPTH = 5
STATE = 576
"""State size of the family: without an RNN, the state has the size of the default model's embeddings."""
RECIPES: dict[str, tuple[DrafterOptions, float]] = {
    "medusa": (DrafterOptions(drafter="medusa", heads=DEPTH, exit_size=1024, blocks=2), 2e-3),
    "eagle": (DrafterOptions(drafter="eagle", exit_size=8192), 1e-3),
    "recurrent": (DrafterOptions(), 2e-3),
}
"""Options and learning rate of each drafter; each has about 16 million parameters."""
FAMILY: dict[str, tuple[DrafterOptions, float]] = {
    f"{cell}-{blocks}": (DrafterOptions(cell=cell, state_size=STATE, exit_size=STATE, blocks=blocks), 2e-3)
    for cell in ("gated", "none")
    for blocks in (1, 2, 4)
} | {"wide-4": (DrafterOptions(), 2e-3)}
"""Drafters that differ in the RNN and the number of residual blocks; the last is also wider."""
SHAPES = ("16x5:63", "4x4:7", "1x5")


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--questions", tiny.questions, "--data", tiny.texts, "--out", tiny.new_folder()]
    return [*words, "--width", 32, "--updates", 1, "--positions", 64, "--held-out", 2, "--max-new-tokens", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "peers.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, required=True, help="folder made by `redrafter distill`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters")
    parser.add_argument("--drafters", nargs="+", default=list(RECIPES), choices=[*RECIPES, *FAMILY, "family"])
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--texts", type=int, help="train on this many texts only (default: all)")
    parser.add_argument("--held-out", type=int, default=TrainConfig.held_out, help="texts kept out of training")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--width", type=int, help="exit size of the drafters (default: the recipe's)")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model)
    texts = read_texts(args.data, target)
    if args.texts:
        texts = texts.select(torch.arange(args.texts) * len(texts) // args.texts)
    rows: list[dict[str, Any]] = []
    for name in [n for chosen in args.drafters for n in (FAMILY if chosen == "family" else [chosen])]:
        options, lr = (RECIPES | FAMILY)[name]
        if args.width:
            state = {"state_size": args.width} if options.drafter == "recurrent" else {}
            options = dataclasses.replace(options, exit_size=args.width, **state)
        config = TrainConfig(
            updates=args.updates,
            positions=args.positions,
            depth=DEPTH,
            lr=lr,
            warmup=args.updates // 8,
            evaluate_every=args.updates if name in FAMILY else -(-args.updates // 2),
            held_out=args.held_out,
            checkpoint_every=max(1, args.updates // 4),
        )
        began = time.perf_counter()
        done = train(target, texts, args.out / f".{name}", options=options, config=config, shape=Shape.of(SHAPES[0]))
        net, _ = checkpoint.read(args.out / f".{name}")
        checkpoint.write(args.out / name, net, target, overwrite=True, storage="int8")
        shutil.copy(args.out / f".{name}" / "journal.jsonl", args.out / name)
        # The trainer keeps the drafter with the best tokens/step, which may not be the last one.
        held_out = max((r["held_out"] for r in done.records if "held_out" in r), key=lambda h: h["tokens_per_step"])
        learned_from = next(r["accuracy"] for r in reversed(done.records) if "accuracy" in r)
        row = {
            "drafter": name,
            "parameters": done.parameters,
            "updates": done.updates,
            "positions": args.positions,
            "texts": len(texts),
            "seconds": round(time.perf_counter() - began, 1),
            "options": {k: v for k, v in dataclasses.asdict(options).items() if v is not None},
            "lr": lr,
            "held_out": held_out,
            "learned_from": learned_from,
            "bytes": (args.out / name / checkpoint.WEIGHTS_FILE).stat().st_size,
        }
        print(json.dumps(row), flush=True)
        # benchmarks/family.py measures the family's tokens/step by decoding.
        for temperature in (0.0,) if name in FAMILY else (0.0, 1.0):
            answers = write_answers(target, args.questions, args.max_new_tokens, temperature, args.out)
            drafter = load_drafter(args.out / name, target)
            batches = list(text_batches(target, drafter.layers, answers))
            for label in SHAPES[:1] if name in FAMILY else SHAPES:
                shape = Shape.of(label)
                found = simulate_batches(batches, drafter, shape)
                row[f"{label}, T={temperature:g}"] = round(found.tokens_per_step, 4)
                row[f"reached {label}, T={temperature:g}"] = [r / found.steps for r in found.reached]
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_results(args.save, headline(rows), rows)


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return tokens/step, and the accuracy of the last depth on held-out texts."""
    found = {f"{r['drafter']}_tokens_per_step": r[f"{SHAPES[0]}, T=0"] for r in rows}
    return found | {f"{r['drafter']}_accuracy_{DEPTH}": round(r["held_out"]["accuracy"][-1], 4) for r in rows}


if __name__ == "__main__":
    main()
