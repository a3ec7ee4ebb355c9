"""Accuracy against speed over a family of drafters (arXiv v1, Figure 4): with an RNN and without, more blocks or fewer.

    python benchmarks/peers.py --data DATA --out RUNS --drafters family --updates 150 --save trained.json
    python benchmarks/family.py --trained trained.json --drafters RUNS

Accuracy is that of the trained file: how often a depth's first guess is right on texts not learned from. Speed is
measured by decoding, all drafters and plain decoding taking turns, on whatever device this runs; the texts must equal
plain decoding's but for ties. `trained` says where accuracies come from. On a GPU steps are recorded as in
benchmarks/table1.py.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from common import arguments
from redrafter.bench.contenders import REFERENCE, Ours
from redrafter.bench.statistics import summaries
from redrafter.config import Shape
from redrafter.drafters import NoDrafter
from redrafter.drafters.load import load_drafter
from redrafter.engine import Engine
from redrafter.results import check_new, write_results
from redrafter.runtime.compiled import Programs
from redrafter.targets import load_target
from table1 import play, warm_up

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
    """Pearson's, between accuracy at the last depth and speed, of all and of those with and without the RNN."""
    groups = {"all": rows, "rnn": [r for r in rows if r["rnn"]], "no_rnn": [r for r in rows if not r["rnn"]]}
    found = {}
    for name, own in groups.items():
        pairs = [(r["accuracy"][-1], r["tokens_per_second"]) for r in own]
        if len(pairs) > 2 and all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            found[f"correlation_{name}"] = round(statistics.correlation(*zip(*pairs, strict=True)), 4)
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "family.json")
    parser.add_argument("--model", help="the target (default: the embedded one)")
    parser.add_argument("--trained", type=Path, required=True, help="what peers.py wrote of the family")
    parser.add_argument("--drafters", type=Path, required=True, help="the folder they are in")
    parser.add_argument("--device")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--suite", default="mt_bench")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
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
        engine = contender.engine
        if engine.programs is not None:
            engine.programs = Programs(target, engine.drafter, engine.rule, compiles=True, whole=False)
        warm_up(contender, [0.0], args.tokens)
        print(f"{time.perf_counter() - began:.0f} s: {contender.name} is ready", flush=True)
    found = {r["contender"]: r for r in summaries(play(contenders, args.suite, 0.0, args), REFERENCE)}
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
    torch.set_grad_enabled(False)
    main()
