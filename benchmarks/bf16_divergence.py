"""How often bf16 texts diverge: speculative from plain decoding, and plain decoding from itself at other batch sizes.

Rounding differs between forward passes of different shapes, so even two plain runs diverge now and then. The reference
is plain decoding of all prompts as one batch. Each contender's texts are compared with the reference up to the first
difference; differences are counted per compared token.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/bf16_divergence.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import Sequence
from typing import Any

from rich.progress import track

from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter import Engine, Shape, load
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.engine.request import Request
from redrafter.engine.ties import first_difference
from redrafter.results import check_new, write_results

SETTINGS = ((0.0, 1), (1.0, 1), (1.0, 2))
"""(temperature, seed)"""


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--device", "cpu", "--questions", tiny.questions]
    return [*words, "--prompts", 2, "--tokens", 4, "--plain", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "bf16_divergence.json")
    parser.add_argument("--model", help="model folder or id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain", type=int, nargs="+", default=[20, 5], help="batch sizes of the other plain runs")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load(args.model, drafter=None, dtype="bf16", device=args.device).target
    plain = Engine(target, NoDrafter())
    ngram = Engine(target, NgramDrafter(), shape=Shape(width=3, length=5, nodes=15))
    own = Engine(target, ModelDrafter(target, target), shape=Shape(width=4, length=4, nodes=15))
    contenders = {
        f"ngram, batch {args.prompts}": (ngram, args.prompts),
        f"self, batch {args.prompts}": (own, args.prompts),
    } | {f"plain, batch {size}": (plain, size) for size in args.plain}
    prompts = first_turns(args.questions, args.prompts)
    rows: list[dict[str, Any]] = []
    for temperature, seed in SETTINGS:
        requests = plain.requests(
            prompts, max_new_tokens=args.tokens, seed=seed, temperature=temperature, ignore_eos=True
        )

        def texts(engine: Engine, batch: int, label: str, requests: list[Request] = requests) -> list[list[int]]:
            starts = track(range(0, len(requests), batch), label)
            return [c.tokens for i in starts for c in engine.complete(requests[i : i + batch])]

        reference = texts(plain, args.prompts, f"T={temperature}: plain, one batch")
        for name, (engine, batch) in contenders.items():
            got = texts(engine, batch, f"T={temperature}: {name}")
            firsts = [first_difference(a, b) for a, b in zip(reference, got, strict=True)]
            rows.append(
                {
                    "temperature": temperature,
                    "seed": seed,
                    "contender": name,
                    "texts": len(firsts),
                    "parted": sum(i is not None for i in firsts),
                    "compared": sum(len(a) if i is None else i + 1 for a, i in zip(reference, firsts, strict=True)),
                }
            )
            print(rows[-1], flush=True)
            write_results(args.save, headline(rows), rows)  # after each, so that an interrupted run keeps them
    print(headline(rows))


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return differences per 1000 compared tokens at temperature 0, which every contender runs first."""
    greedy = [r for r in rows if r["temperature"] == 0]
    speculative = [r for r in greedy if not r["contender"].startswith("plain")]
    rates = {"speculative_t0": 1000 * sum(r["parted"] for r in speculative) / sum(r["compared"] for r in speculative)}
    for r in greedy:
        if r["contender"].startswith("plain"):
            size = r["contender"].split()[-1]
            rates[f"plain_batch_{size}_t0"] = 1000 * r["parted"] / r["compared"]
    return rates


if __name__ == "__main__":
    main()
