"""Accuracy against speed of a family of drafters, with and without an RNN (arXiv v1, Figure 4).

    python benchmarks/peers.py --data DATA --out RUNS --drafters family --updates 150 --save trained.json
    python benchmarks/family.py --trained trained.json --drafters RUNS

Accuracy comes from the results of peers.py: the top-1 accuracy of each depth on held-out texts. Speed is measured by
decoding, with all drafters and plain decoding taking turns; the texts must equal those of plain decoding except for
ties. `trained` names the run that the accuracies come from. On a GPU, steps are recorded as in benchmarks/table1.py.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/family.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from benchmarks.table1 import answer_suite, warm_up
from redrafter.bench.contenders import REFERENCE, Ours
from redrafter.bench.statistics import summaries
from redrafter.config import Shape
from redrafter.drafters import NoDrafter
from redrafter.drafters.load import load_drafter
from redrafter.engine import Engine
from redrafter.results import check_new, write_results
from redrafter.targets import load_target

MEASURED = (
    "tokens_per_step",
    "tokens_per_second",
    "speedup",
    "speedup_low",
    "speedup_high",
    "compared",
    "equal",
    "ties",
)


def correlations(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Pearson correlations of the last depth's accuracy with speed: for all drafters, with and without RNN."""
    groups = {"all": rows, "rnn": [r for r in rows if r["rnn"]], "no_rnn": [r for r in rows if not r["rnn"]]}
    found = {}
    for name, own in groups.items():
        pairs = [(r["accuracy"][-1], r["tokens_per_second"]) for r in own]
        if len(pairs) > 2 and all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            found[f"correlation_{name}"] = round(statistics.correlation(*zip(*pairs, strict=True)), 4)
    return found


def smoke(tiny: TinyFiles) -> list[object]:
    row = {"drafter": "recurrent", "options": {"cell": "rnn"}, "parameters": 1, "updates": 1}
    facts = dict.fromkeys(("command", "commit", "hardware", "date"), "")
    trained = tiny.new_folder() / "trained.json"
    trained.write_text(json.dumps(facts | {"rows": [row | {"held_out": {"accuracy": [0.5, 0.25]}}]}))
    words = ["--model", tiny.model, "--device", "cpu", "--trained", trained, "--drafters", tiny.drafters]
    return [*words, "--suite", tiny.questions, "--prompts", 1, "--tokens", 4, "--rounds", 1, "--beam", "2x3:4"]


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "family.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--trained", type=Path, required=True, help="results of peers.py for the family")
    parser.add_argument("--drafters", type=Path, required=True, help="folder of the drafters")
    parser.add_argument("--device")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--suite", default="mt_bench")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    trained = json.loads(args.trained.read_text())
    began = time.perf_counter()
    target = load_target(args.model, device=args.device)
    args.device = target.device.type
    contenders = [Ours(REFERENCE, Engine(target, NoDrafter()))]
    for row in trained["rows"]:
        drafter = load_drafter(args.drafters / row["drafter"], target)
        contenders.append(Ours(row["drafter"], Engine(target, drafter, shape=Shape.of(args.beam))))
    for contender in contenders:
        contender.engine.compiles_step = False
        warm_up(contender, [0.0], args.tokens)
        print(f"{time.perf_counter() - began:.0f} s: {contender.name} is ready", flush=True)
    found = {r["contender"]: r for r in summaries(answer_suite(contenders, args.suite, 0.0, args), REFERENCE)}
    rows = [
        {
            "drafter": r["drafter"],
            "rnn": r["options"]["cell"] != "none",
            "blocks": r["options"].get("blocks", 4),
            "parameters": r["parameters"],
            "updates": r["updates"],
            "accuracy": r["held_out"]["accuracy"],
            "beam": args.beam,
            **{k: found[r["drafter"]][k] for k in MEASURED},
        }
        for r in trained["rows"]
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    made = {k: trained[k] for k in ("command", "commit", "hardware", "date")}
    plain = {"drafter": REFERENCE, "tokens_per_second": found[REFERENCE]["tokens_per_second"], "trained": made}
    write_results(
        args.save,
        {f"{r['drafter']}_speedup": round(r["speedup"], 4) for r in rows} | correlations(rows),
        [*rows, plain],
    )


if __name__ == "__main__":
    main()
