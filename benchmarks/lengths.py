"""tokens/step against how much has been written (arXiv v1, Figure 5a), for any drafters, along the target's answers.

    python benchmarks/lengths.py --drafters auto ngram RUNS/medusa RUNS/eagle

Every drafter is simulated on the same answers, cut to each length; shorter answers are left out. The simulation
gives what decoding would (see tuning/simulate.py).
"""

import json
from pathlib import Path
from typing import Any

from ablations import written
from common import arguments
from redrafter.config import Shape
from redrafter.engine.resolve import resolve_drafter
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.texts import Texts
from redrafter.tuning.simulate import simulate_batches, text_batches


def upto(texts: Texts, length: int) -> Texts:
    """Answers cut to so many tokens, those that are longer only."""
    answers = texts.lengths - texts.prompts
    rows = (answers >= length).nonzero()[:, 0].tolist()
    cut = [texts.row(i)[: int(texts.prompts[i]) + length].tolist() for i in rows]
    chosen = texts.select(rows)
    return Texts.of(cut, chosen.prompts.tolist(), chosen.temperatures.tolist(), chosen.seeds.tolist())


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "lengths.json")
    parser.add_argument("--model", help="the target (default: the embedded one)")
    parser.add_argument("--drafters", nargs="+", default=["auto", "ngram"])
    parser.add_argument("--beams", nargs="+", default=["16x5:63"], metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=80, help="questions, spread over the file (default 80)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--answers", type=Path, required=True, help="a folder; answers are written there once")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    target = load_target(args.model)
    rows: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        texts = written(target, args.questions, max(args.lengths), temperature, args.answers, args.prompts)
        for name in args.drafters:
            drafter = resolve_drafter(name, target)
            for beam in args.beams:
                shape = Shape.of(beam)
                for length in args.lengths:
                    cut = upto(texts, length)
                    batches = text_batches(target, drafter.layers, cut)
                    found = simulate_batches(batches, drafter, shape)
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
