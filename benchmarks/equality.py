"""Compare speculative with plain decoding on the default model: equal texts, numerical ties, wrong texts.

A first difference counts as a numerical tie only if the two tokens' scores (or the distances to a filter's threshold)
are closer than 1e-3. Every difference is listed with its gap.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/equality.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import time
from collections.abc import Sequence
from typing import Any

from rich.progress import track

import redrafter
from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter import Engine, Shape
from redrafter.drafters import ModelDrafter, NgramDrafter
from redrafter.engine.ties import explain
from redrafter.results import check_new, write_results

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.1},
}


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--model", tiny.model, "--questions", tiny.questions, "--prompts", 1, "--tokens", 4]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "equality_cpu.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    engine = redrafter.load(args.model, device="cpu", dtype="fp32")
    contenders = {
        "ngram": Engine(engine.target, NgramDrafter(), shape=Shape(width=3, length=5, nodes=11)),
        # The target as its own draft model is slow, but accepts long paths through the tree.
        "self": Engine(
            engine.target, ModelDrafter(engine.target, engine.target), shape=Shape(width=2, length=4, nodes=7)
        ),
    }
    prompts = first_turns(args.questions, args.prompts)
    rows: list[dict[str, Any]] = []
    for setting, options in SETTINGS.items():
        requests = engine.requests(prompts, max_new_tokens=args.tokens, seed=17, ignore_eos=True, **options)
        batches = [requests[i : i + args.batch] for i in range(0, len(requests), args.batch)]
        plain = [c for b in track(batches, f"{setting}: plain") for c in engine.plain().complete(b)]
        for name, contender in contenders.items():
            if name == "self" and setting == "penalised":
                continue  # the slowest setting
            began = time.perf_counter()
            done = [c for b in track(batches, f"{setting}: {name}") for c in contender.complete(b)]
            seconds = time.perf_counter() - began
            differences = [
                (i, explain(engine.target, request, one.tokens, other.tokens))
                for i, (request, one, other) in enumerate(zip(requests, plain, done, strict=True))
            ]
            found = [(i, d) for i, d in differences if d is not None]
            steps = sum(c.stats.steps for c in done)
            row: dict[str, Any] = {
                "setting": setting,
                "drafter": name,
                "texts": len(done),
                "tokens": sum(len(c.tokens) for c in done),
                "equal": sum(d is None for _, d in differences),
                "ties": sum(d.is_tie for _, d in found),
                "wrong": sum(not d.is_tie for _, d in found),
                "tokens_per_step": sum(len(c.tokens) - 1 for c in done) / steps,
                "seconds": seconds,
                "differences": [{"prompt": i, "index": d.index, "gap": d.gap} for i, d in found],
            }
            rows.append(row)
            print({k: v for k, v in row.items() if k != "differences"}, flush=True)
    headline = {
        "texts": sum(r["texts"] for r in rows),
        "equal": sum(r["equal"] for r in rows),
        "ties": sum(r["ties"] for r in rows),
        "wrong": sum(r["wrong"] for r in rows),
    }
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
