"""What each part of the drafter and of its training is worth: one change at a time, same data, same updates.

    python benchmarks/ablations.py --data DATA --out RUNS --text docs.txt

`DATA` is a folder of `redrafter distill`. tokens/step are simulated along the target's own answers to the
questions (see tuning/simulate.py), written once. The last variants are the papers' Table 6: text that the
target did not write, learned from as it is, and through the target's local rollouts on it. Several processes
may share the work (`--variants`); their files are put together by benchmarks/drafter.py.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from redrafter.runtime.eager import Start
from safetensors.torch import load_file, save_file

from common import arguments, first_turns
from redrafter.config import Shape
from redrafter.core.noise import fold
from redrafter.drafters import NoDrafter, RecurrentDrafter
from redrafter.drafters.options import DrafterOptions
from redrafter.engine import Engine
from redrafter.results import write_results
from redrafter.runtime.bulk import write_texts
from redrafter.targets import Target, load_target
from redrafter.texts import Texts
from redrafter.train.config import TrainConfig
from redrafter.train.dataset import read_texts
from redrafter.train.distill import DistillConfig, distill
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


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "ablations.json")
    parser.add_argument("--model", help="the target (default: the embedded one)")
    parser.add_argument("--data", type=Path, required=True, help="a folder of `redrafter distill`")
    parser.add_argument("--out", type=Path, required=True, help="where the drafters go")
    parser.add_argument("--text", type=Path, help="text that the target did not write")
    parser.add_argument("--documents", type=int, default=3000, help="pieces of it (default 3000)")
    parser.add_argument("--variants", nargs="+", help="only these (default: all)")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    target = load_target(args.model)
    answers = {t: written(target, args.questions, args.max_new_tokens, t, args.out) for t in (0.0, 1.0)}
    texts = read_texts(args.data, target)
    jobs = [(name, texts, *VARIANTS[name]) for name in VARIANTS if not args.variants or name in args.variants]
    wanted = [name for name in ON_TEXT if args.text and (not args.variants or name in args.variants)]
    if wanted:
        rolled = documents(target, args.text, args.documents, args.out / "documents")
        plain = dataclasses.replace(rolled, rollouts=None)
        jobs += [(name, plain if "tokens" in name else rolled, {}, ON_TEXT[name]) for name in wanted]
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
                }
                | config
            )
        )
        done = train(target, data, folder, options=DrafterOptions(**options), config=settings)
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
            walked = simulate(target, drafter, answers[temperature], SHAPES[label])
            row[f"{label}, T={temperature:g}"] = round(walked.tokens_per_step, 4)
        row["held_out"] = next(r["held_out"] for r in reversed(done.records) if "held_out" in r)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_results(args.save, {r["variant"]: r["16x5:63, T=0"] for r in rows}, rows)


def written(
    target: Target, questions: Path, tokens: int, temperature: float, folder: Path, count: int = 10**6
) -> Texts:
    """The target's answers to all questions, or so many of them, written once."""
    path = folder / f"answers-{temperature:g}.safetensors"
    if path.exists():
        return Texts(**load_file(path))
    engine = Engine(target, NoDrafter())
    prompts = [engine.encode(messages) for messages in first_turns(questions, count)]
    starts = [Start(p, fold(0, i), tokens, engine.eos_tokens()) for i, p in enumerate(prompts)]
    new = write_texts(target, starts, [temperature] * len(starts), rows=len(starts))
    rows = [[*p, *w] for p, w in zip(prompts, new, strict=True)]
    found = Texts.of(rows, [len(p) for p in prompts], [temperature] * len(rows), [s.seed for s in starts])
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{time.time_ns()}")
    save_file({k: v for k, v in vars(found).items() if v is not None}, scratch)
    scratch.replace(path)
    return found


def documents(target: Target, path: Path, count: int, folder: Path) -> Texts:
    config = DistillConfig(texts=count, local=6, max_new_tokens=256)
    distill(target, folder, config, documents=read_documents(path))
    return read_texts(folder, target)


if __name__ == "__main__":
    main()
