"""Ablations of the drafter and of its training: one change at a time, with the same data and number of updates.

    python benchmarks/ablations.py --data DATA --out RUNS --text docs.txt

`DATA` is a folder made by `redrafter distill`. tokens/step are simulated along the target's answers to the questions
(see tuning/simulate.py), which are written once. The last variants are the papers' Table 6: training on text that the
target did not write, directly and through the target's local rollouts. Several processes may share the work
(`--variants`); benchmarks/drafter.py includes their results.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/ablations.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.answers import write_answers
from benchmarks.common import arguments, parse
from benchmarks.smoke import QUESTIONS, TinyFiles
from redrafter.config import Shape
from redrafter.drafters import RecurrentDrafter
from redrafter.drafters.options import DrafterOptions
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.texts import Texts
from redrafter.train.config import DistillConfig, TrainConfig
from redrafter.train.dataset import read_texts
from redrafter.train.distill import distill
from redrafter.train.local_rollouts import read_documents
from redrafter.train.trainer import train
from redrafter.tuning.simulate import simulate

SHAPES = {
    "1x5": Shape(width=1, length=5),
    "16x5": Shape(width=16, length=5),
    "16x5:63": Shape(width=16, length=5, nodes=63),
    "4x5:7": Shape(width=4, length=5, nodes=7),
}
PAPERS = {
    "cell": "rnn", "first_state": "embedding", "blocks": 2, "head": "own", "draft_vocab": 0, "layers": (-1,),
    "memory_heads": 0, "normed": False,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all of it": ({}, {}),
    "hard labels": ({}, {"loss": "hard"}),
    "acceptance loss": ({}, {"loss": "acceptance"}),
    "plain RNN": ({"cell": "rnn"}, {}),
    "no RNN": ({"cell": "none"}, {}),
    "first state from the embedding": ({"first_state": "embedding"}, {}),
    "first state zero": ({"first_state": "zero"}, {}),
    "own head": ({"head": "own"}, {}),
    "all 49152 tokens": ({"draft_vocab": 0}, {}),
    "8192 tokens": ({"draft_vocab": 8192}, {}),
    "last layer only": ({"layers": (-1,)}, {}),
    "no memory": ({"memory_heads": 0}, {}),
    "2 blocks": ({"blocks": 2}, {}),
    "not normed": ({"normed": False}, {}),
    "the papers' drafter, hard labels": (PAPERS, {"loss": "hard"}),
    "the papers' drafter, soft labels": (PAPERS, {"loss": "soft"}),
}
ON_TEXT: dict[str, dict[str, Any]] = {
    "other text, its own tokens": {"loss": "hard", "depth": 5},
    "other text, local rollouts": {"loss": "hard", "depth": 5},
    "other text, local rollouts, soft labels": {"loss": "soft", "depth": 5},
}


def smoke(tiny: TinyFiles) -> list[object]:
    text = tiny.new_folder() / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} {q}"}) + "\n" for i in range(3) for q in QUESTIONS))
    words = ["--model", tiny.model, "--questions", tiny.questions, "--data", tiny.texts, "--out", tiny.new_folder()]
    words += ["--text", text, "--documents", 12, "--variants", "no memory", "other text, local rollouts"]
    return [*words, "--width", 32, "--updates", 1, "--positions", 64, "--held-out", 2, "--max-new-tokens", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "ablations.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, required=True, help="folder made by `redrafter distill`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters")
    parser.add_argument("--text", type=Path, help="text that the target did not write")
    parser.add_argument("--documents", type=int, default=3000, help="number of documents of --text (default 3000)")
    parser.add_argument("--variants", nargs="+", help="train only these variants (default: all)")
    parser.add_argument("--width", type=int, help="state and exit size of the drafters (default: the usual sizes)")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=TrainConfig.held_out, help="texts kept out of training")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model)
    answers = {t: write_answers(target, args.questions, args.max_new_tokens, t, args.out) for t in (0.0, 1.0)}
    texts = read_texts(args.data, target)
    jobs = [(name, texts, *VARIANTS[name]) for name in VARIANTS if not args.variants or name in args.variants]
    on_text = [name for name in ON_TEXT if args.text and (not args.variants or name in args.variants)]
    if on_text:
        rolled = documents(target, args.text, args.documents, args.out / "documents")
        plain = dataclasses.replace(rolled, rollouts=None)
        jobs += [(name, plain if "tokens" in name else rolled, {}, ON_TEXT[name]) for name in on_text]
    sizes = {"state_size": args.width, "exit_size": args.width}
    rows: list[dict[str, Any]] = []
    for name, data, options, config in jobs:
        began = time.perf_counter()
        folder = args.out / name.replace(" ", "-").replace(",", "").replace("'", "")
        settings = TrainConfig(
            **(
                {
                    "updates": args.updates,
                    "positions": args.positions,
                    "evaluate_every": args.updates,
                    "warmup": args.updates // 8,
                    "held_out": args.held_out,
                }
                | config
            )
        )
        done = train(target, data, folder, options=DrafterOptions(**(sizes | options)), config=settings)
        seconds = time.perf_counter() - began
        drafter = RecurrentDrafter.load(folder, target)
        row: dict[str, Any] = {
            "variant": name,
            "options": options | config,
            "parameters": done.parameters,
            "updates": done.updates,
            "positions": args.positions,
            "seconds": round(seconds, 1),
        }
        for temperature, label in [(0.0, label) for label in SHAPES] + [(1.0, "16x5:63")]:
            found = simulate(target, drafter, answers[temperature], SHAPES[label])
            row[f"{label}, T={temperature:g}"] = round(found.tokens_per_step, 4)
        row["held_out"] = next(r["held_out"] for r in reversed(done.records) if "held_out" in r)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_results(args.save, {r["variant"]: r["16x5:63, T=0"] for r in rows}, rows)


def documents(target: Target, path: Path, count: int, folder: Path) -> Texts:
    config = DistillConfig(texts=count, local=6, max_new_tokens=256)
    distill(target, folder, config, documents=read_documents(path))
    return read_texts(folder, target)


if __name__ == "__main__":
    main()
