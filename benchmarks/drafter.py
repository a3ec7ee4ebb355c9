"""tokens/step of a drafter on MT-Bench, with and without answers that end in a loop.

    python benchmarks/drafter.py --drafter FOLDER --dtype fp32 --minutes 12.3 --ablations a.json b.json

The target writes its answers once, in the given dtype, at temperature 0 and 1. tokens/step are then simulated along the
answers for each shape, which gives the same figure as decoding (see tuning/simulate.py). An answer loops if its end
repeats with a period of at most 64 tokens, at least three times and for at least 32 tokens.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/drafter.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.answers import write_answers
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.engine.resolve import resolve_drafter
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.tuning.simulate import SimulatedSteps, text_batches

SHAPES = {
    0.0: [
        "16x5:63",
        "16x6:63",
        "16x8:63",
        "24x8:63",
        "16x10:63",
        "24x10:63",
        "4x3:7",
        "4x4:7",
        "4x5:7",
        "7x4:7",
        "8x6:15",
        "1x5",
    ],
    1.0: ["16x5:63", "16x6:63", "24x6:63", "32x6:63", "24x8:63", "4x4:7"],
}


def loops(tokens: list[int]) -> bool:
    """Return whether the end of a text repeats.

    >>> loops(list(range(100))), loops(list(range(60)) + [7, 8, 9] * 11)
    (False, True)
    """
    for period in range(1, 65):
        length = max(3 * period, 32)
        end = tokens[-length:]
        if len(end) == length and all(a == b for a, b in zip(end, end[period:], strict=False)):
            return True
    return False


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions]
    return [*words, "--max-new-tokens", 4, "--shapes", "4x4:7"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "drafter_smollm2.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--drafter", default="auto", help="drafter folder (default: the one that comes with the package)"
    )
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--minutes", type=float, help="measured minutes of making the data and training")
    parser.add_argument("--ablations", type=Path, nargs="*", default=[], help="results of ablations.py to include")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", help="measure only these shapes (default: all)")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model, dtype=args.dtype)
    drafter = resolve_drafter(args.drafter, target)
    categories = [q.category for q in read_questions(args.questions)]
    rows: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for temperature, every_shape in SHAPES.items():
            shapes = [s for s in every_shape if not args.shapes or s in args.shapes]
            texts = write_answers(target, args.questions, args.max_new_tokens, temperature, Path(scratch))
            looping = [loops(texts.row(i)[int(texts.prompts[i]) :].tolist()) for i in range(len(texts))]
            batches = list(text_batches(target, drafter.layers, texts))
            for shape in map(Shape.of, shapes):
                found = {r: s for b in batches for r, s in zip(b.rows, b.simulate(drafter, shape), strict=True)}
                every = [found[row] for row in range(len(texts))]
                for name in ["all", "no loops", *dict.fromkeys(categories)]:
                    chosen = [
                        steps
                        for steps, c, loop in zip(every, categories, looping, strict=True)
                        if name in ("all", c) or (name == "no loops" and not loop)
                    ]
                    total = SimulatedSteps.total(chosen, shape)
                    before = (total.steps, *total.reached)
                    rows.append(
                        {
                            "kind": "tokens/step",
                            "temperature": temperature,
                            "shape": shape.label,
                            "answers": name,
                            "count": len(chosen),
                            "tokens": total.tokens,
                            "steps": total.steps,
                            "tokens_per_step": round(total.tokens_per_step, 4),
                            "accepted_by_depth": [
                                round(a / b, 4) if b else None for a, b in zip(total.reached, before, strict=False)
                            ],
                        }
                    )
                    if name in ("all", "no loops"):
                        suffix = "" if name == "all" else "_no_loops"
                        key = f"mt_bench_t{temperature:g}_n{shape.budget}{suffix}"
                        best[key] = max(best.get(key, 0.0), round(total.tokens_per_step, 4))
                print(shape.label, temperature, rows[-len(set(categories)) - 2]["tokens_per_step"], flush=True)
    for path in args.ablations:
        rows += [{"kind": "ablation"} | row for row in json.loads(path.read_text())["rows"]]
    if args.minutes is not None:
        best["minutes_to_train"] = args.minutes
    write_results(args.save, best, rows)


if __name__ == "__main__":
    main()
