"""Ablations of the drafter and of its training: one change at a time, with the same amount of data and training.

    python benchmarks/texts.py --out DATA --answers ANSWERS --seconds 60 --at-once
    python benchmarks/ablations.py --data DATA/tasks-0 --free DATA/free --answers ANSWERS --out RUNS --minutes 2 \\
        --at-once
    python benchmarks/ablations.py --data DATA --out RUNS --text docs.txt --variants "other text, local rollouts"

DATA/... are folders made by texts.py or by `redrafter distill`. With `--minutes` each variant has the same time, in
which its learning rate falls to zero; `--at-once` trains all of them at the same time, in a process each, on the same
GPU. tokens/step are simulated along the target's answers to the questions (see tuning/simulate.py): by the drafter
alone, with n-grams, and with n-grams whose copied tokens all have the same odds instead of those of a table. The
variants about other text are the papers' Table 6: training on text that the target did not write, directly and through
the target's local rollouts.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/ablations.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.answers import write_answers
from benchmarks.at_once import run_at_once
from benchmarks.common import arguments, parse
from benchmarks.peers import last_records, read_folders, time_or_updates
from benchmarks.smoke import QUESTIONS, TinyFiles
from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import RecurrentDrafter, WithNgrams, shipped
from redrafter.drafters.options import DrafterOptions
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.texts import Texts
from redrafter.train.config import DistillConfig, TrainConfig
from redrafter.train.dataset import read_texts
from redrafter.train.distill import distill
from redrafter.train.local_rollouts import read_documents
from redrafter.train.trainer import train
from redrafter.tuning.simulate import simulate_batches, text_batches

PAPERS = {
    "cell": "rnn", "first_state": "embedding", "blocks": 2, "head": "own", "draft_vocab": 0, "layers": (-1,),
    "memory_heads": 0, "normed": False,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all of it": ({}, {}),
    "hard labels": ({}, {"loss": "hard"}),
    "acceptance loss": ({}, {"loss": "acceptance"}),
    "loss under shared noise": ({}, {"loss": "seeded"}),
    "depth 4": ({}, {"depth": 4}),
    "depth 5": ({}, {"depth": 5}),
    "depth 8": ({}, {"depth": 8}),
    "plain RNN": ({"cell": "rnn"}, {}),
    "no RNN": ({"cell": "none"}, {}),
    "first state from the embedding": ({"first_state": "embedding"}, {}),
    "first state zero": ({"first_state": "zero"}, {}),
    "own head": ({"head": "own"}, {}),
    "all 49152 tokens": ({"draft_vocab": 0}, {}),
    "8192 tokens": ({"draft_vocab": 8192}, {}),
    "last layer only": ({"layers": (-1,)}, {}),
    "no memory": ({"memory_heads": 0}, {}),
    "twice the memory": ({"memory_heads": 8}, {}),
    "2 blocks": ({"blocks": 2}, {}),
    "not normed": ({"normed": False}, {}),
    "the papers' drafter, hard labels": (PAPERS, {"loss": "hard"}),
    "the papers' drafter, soft labels": (PAPERS, {"loss": "soft"}),
}
FREE = "no tasks among the prompts"
"""Trained on the texts of `--free`."""
ON_TEXT: dict[str, dict[str, Any]] = {
    "other text, its own tokens": {"loss": "hard", "depth": 5},
    "other text, local rollouts": {"loss": "hard", "depth": 5},
    "other text, local rollouts, soft labels": {"loss": "soft", "depth": 5},
}
SHIPPED = "the drafter in the package, longer trained"
RECIPE = (
    "all of it", FREE, "hard labels", "acceptance loss", "loss under shared noise", "depth 4", "depth 5", "depth 8",
    SHIPPED,
)  # fmt: skip
"""The default: the training recipe, and the drafter that it has made."""
TABLE = "n-grams"
CONSTANT = 0.7
"""Odds of every copied token, in place of the table's."""


def smoke(tiny: TinyFiles) -> list[object]:
    text = tiny.new_folder() / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} {q}"}) + "\n" for i in range(3) for q in QUESTIONS))
    words = ["--model", tiny.model, "--questions", tiny.questions, "--data", tiny.texts, "--out", tiny.new_folder()]
    words += ["--free", tiny.texts, "--text", text, "--documents", 12]
    words += ["--variants", FREE, "other text, local rollouts"]
    return [*words, "--width", 32, "--updates", 1, "--positions", 64, "--held-out", 2, "--max-new-tokens", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "ablations_gpu.json")
    names = [*VARIANTS, FREE, *ON_TEXT, SHIPPED]
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of training texts")
    parser.add_argument("--free", type=Path, help=f"folder of texts for the variant: {FREE}")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters")
    parser.add_argument("--answers", type=Path, help="folder of the answers to the questions (default: --out)")
    parser.add_argument("--text", type=Path, help="text that the target did not write")
    parser.add_argument("--documents", type=int, default=3000, help="number of documents of --text (default 3000)")
    parser.add_argument("--variants", nargs="+", default=list(RECIPE), choices=names, metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=["16x5:63"], metavar="WxL:N")
    parser.add_argument("--width", type=int, help="state and exit size of the drafters (default: the usual sizes)")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--minutes", type=float, help="train each variant for this time, in place of --updates")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--texts", type=int, help="train on this many texts only (default: those of the smallest data)")
    parser.add_argument("--held-out", type=int, default=TrainConfig.held_out, help="texts kept out of training")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--at-once", action=argparse.BooleanOptionalAction, default=False, help="a process per variant")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    if FREE in args.variants and args.free is None:
        parser.error(f"the variant {FREE!r} needs --free")
    if (of_text := ON_TEXT.keys() & set(args.variants)) and args.text is None:
        parser.error(f"the variants {sorted(of_text)} need --text")
    if len(of_text) > 1 and args.at_once:
        parser.error(f"only one of {sorted(of_text)} can run with --at-once: they write the same texts")
    if args.at_once:
        parts = {name: ["--variants", name] for name in args.variants}
        words = sys.argv[1:] if argv is None else argv
        rows, failed = run_at_once(__file__, words, parts, args.out / "logs")
    else:
        rows, failed = [], []
        target = load_target(args.model)
        for row in measured(target, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_results(args.save, headline(rows, args.shapes[0]), rows)
    write_results(args.save, headline(rows, args.shapes[0]), rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def headline(rows: Sequence[dict[str, Any]], shape: str) -> dict[str, float]:
    """tokens/step at T = 0 without n-grams."""
    return {row["variant"]: row[f"{shape}, T=0"] for row in rows}


def measured(target: Target, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each variant and simulate it."""
    for name in args.variants:
        if name == SHIPPED:
            folder = shipped.find(target)
            if folder is None:
                sys.exit(f"no drafter comes with the package for {target.name}: leave out the variant {SHIPPED!r}")
            row: dict[str, Any] = {"variant": name, "options": {}, "updates": 0}
        else:
            folder, row = trained(name, target, args)
        drafter = RecurrentDrafter.load(folder, target)
        row["parameters"] = sum(p.numel() for p in drafter.net.parameters())
        yield row | simulated(target, drafter, args)


def trained(name: str, target: Target, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Train one variant. Returns its folder and a row about the training."""
    options, config = VARIANTS.get(name, ({}, ON_TEXT.get(name, {})))
    texts = texts_for(name, target, args)
    folder = args.out / name.replace(" ", "-").replace(",", "").replace("'", "")
    sizes = {"state_size": args.width, "exit_size": args.width}
    settings = TrainConfig(**time_or_updates(args) | config)
    began = time.perf_counter()
    done = train(target, texts, folder, options=DrafterOptions(**(sizes | options)), config=settings)
    return folder, {
        "variant": name,
        "options": options | config,
        "texts": len(texts),
        "updates": done.updates,
        "minutes": args.minutes,
        "positions": args.positions,
        "seconds": round(time.perf_counter() - began, 1),
        **last_records(done),
    }


def texts_for(name: str, target: Target, args: argparse.Namespace) -> Texts:
    """The texts that a variant is trained on. With and without tasks there are equally many."""
    if name in ON_TEXT:
        rolled = documents(target, args.text, args.documents, args.out / "documents")
        return dataclasses.replace(rolled, rollouts=None) if "tokens" in name else rolled
    texts = read_folders(args.data, target)
    free = texts if args.free is None else read_folders([args.free], target)
    count = min(len(texts), len(free), args.texts or len(texts))
    return (free if name == FREE else texts).select(torch.arange(count))


def simulated(target: Target, drafter: RecurrentDrafter, args: argparse.Namespace) -> dict[str, Any]:
    """tokens/step along the answers for each shape and temperature: alone, with n-grams, with constant odds."""
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        answers = write_answers(target, args.questions, args.max_new_tokens, temperature, args.answers or args.out)
        batches = list(text_batches(target, drafter.layers, answers))
        mixed, constant = WithNgrams(drafter), WithNgrams(drafter)
        constant.odds = torch.full_like(constant.odds, CONSTANT)
        kinds: dict[str, Drafter] = {"": drafter, f", {TABLE}": mixed, f", {TABLE} at {CONSTANT}": constant}
        for label in args.shapes:
            for kind, one in kinds.items():
                steps = simulate_batches(batches, one, Shape.of(label))
                found[f"{label}{kind}, T={temperature:g}"] = round(steps.tokens_per_step, 4)
    return found


def documents(target: Target, path: Path, count: int, folder: Path) -> Texts:
    config = DistillConfig(texts=count, local=6, max_new_tokens=256)
    distill(target, folder, config, documents=read_documents(path))
    return read_texts(folder, target)


if __name__ == "__main__":
    main()
