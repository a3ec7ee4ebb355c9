"""tokens/step by length of the answer (arXiv v1, Figure 5a), for any drafters.

    python benchmarks/lengths.py --drafters auto ngram RUNS/medusa RUNS/eagle

All drafters are simulated along the same answers of the target, truncated to each length; shorter answers are left out.
The simulation gives the same tokens/step as decoding (see tuning/simulate.py).
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/lengths.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.answers import write_answers
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.engine.resolve import resolve_drafter
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.texts import Texts
from redrafter.tuning.simulate import simulate


def truncate(texts: Texts, length: int) -> Texts:
    """Return the answers of at least `length` tokens, truncated to `length`."""
    answers = texts.lengths - texts.prompts
    rows = (answers >= length).nonzero()[:, 0].tolist()
    cut = [texts.row(i)[: int(texts.prompts[i]) + length].tolist() for i in rows]
    chosen = texts.select(rows)
    return Texts.of(cut, chosen.prompts.tolist(), chosen.temperatures.tolist(), chosen.seeds.tolist())


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--questions", tiny.questions, "--prompts", 1, "--answers", tiny.new_folder()]
    return [*words, "--lengths", 4, "--temperatures", 0.0, "--drafters", "ngram", "--beams", "1x3"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "lengths.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafters", nargs="+", default=["recurrent", "ngram"])
    parser.add_argument("--beams", nargs="+", default=["16x5:63"], metavar="WxL:N")
    parser.add_argument(
        "--prompts", type=int, default=80, help="number of questions, spread over the file (default 80)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--answers", type=Path, required=True, help="folder to which the answers are written once")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model)
    rows: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        texts = write_answers(target, args.questions, max(args.lengths), temperature, args.answers, args.prompts)
        for name in args.drafters:
            drafter = resolve_drafter(name, target)
            for beam in args.beams:
                shape = Shape.of(beam)
                for length in args.lengths:
                    cut = truncate(texts, length)
                    found = simulate(target, drafter, cut, shape)
                    rows.append(
                        {
                            "drafter": Path(name).name,
                            "beam": beam,
                            "temperature": temperature,
                            "length": length,
                            "answers": len(cut),
                            "tokens_per_step": found.tokens_per_step,
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
                    longest = [r for r in rows if r["length"] == max(args.lengths) and r["temperature"] == 0]
                    write_results(args.save, {r["drafter"]: r["tokens_per_step"] for r in longest}, rows)


if __name__ == "__main__":
    main()
