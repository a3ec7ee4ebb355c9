"""Our own server under a constant load, without HTTP: so many requests at once, speculative against plain decoding.

    python benchmarks/own_gpu.py

One running batch serves all. Speculative and plain requests take turns, round by round, after a round to warm up; a
request that ends makes room for the next one. Every text is compared with that of the plain round. Results are written
after each level.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/own_gpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import SMOKE, load_wide
from redrafter import Engine, Shape
from redrafter.drafters import WithNgrams
from redrafter.engine.request import Request
from redrafter.planning.steps import FixedSteps
from redrafter.results import check_new, write_results
from redrafter.runtime.batch import Batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.job import Job
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.tuning.at_rest import warm_up

SEED = 11
WAYS = ("plain", "speculative")


class ByRows(FixedSteps):
    """The beam of the next level."""

    def __init__(self, beams: dict[int, str]) -> None:
        super().__init__(None)
        self.beams = beams

    def choose(self, rows: int) -> Shape | None:
        return Shape.of(self.beams[min(n for n in self.beams if n >= rows)])


def run(scheduler: Scheduler, requests: Sequence[Request], level: int, tokenizer: Any) -> dict[str, Any]:
    """Write all requests, `level` at once; their texts, and how long it took."""
    jobs = [Job(request, lambda _: None, tokenizer=tokenizer, reuses=False) for request in requests]
    waiting = list(reversed(jobs))
    began = time.perf_counter()
    while not all(job.finished for job in jobs):
        while waiting and sum(not job.finished for job in jobs) - len(waiting) < level:
            job = waiting.pop()
            job.submitted = time.perf_counter()
            scheduler.submit([job])
        scheduler.turn()
    seconds = time.perf_counter() - began
    first = sorted(1000 * (job.first - job.submitted) for job in jobs)
    texts = [job.writer.ids[len(job.request.prompt) :] for job in jobs]
    steps = sum(job.writer.stats.steps for job in jobs)
    return {
        "seconds": seconds,
        "texts": texts,
        "tokens": sum(map(len, texts)),
        "tokens_per_step": (sum(map(len, texts)) - len(texts)) / max(1, steps),
        "ttft_ms": statistics.mean(first),
        "ttft_p99_ms": first[min(len(first) - 1, int(0.99 * len(first)))],
    }


def measure(
    scheduler: Scheduler, shapes: FixedSteps, engine: Engine, args: argparse.Namespace, level: int, temperature: float
) -> dict[str, Any]:
    """One level of load: rounds of both ways, in turns."""
    beam = Shape.of(args.beams[level])
    prompts = first_turns(args.questions, min(80, max(level, args.requests * level)))
    options = {"temperature": temperature, "seed": SEED, "max_new_tokens": args.tokens, "ignore_eos": True}
    requests = [
        r for _ in range(-(-args.requests * level // len(prompts))) for r in engine.requests(prompts, **options)
    ]
    requests = requests[: max(level, args.requests * level)]
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(args.rounds + 1):
        for way in WAYS:
            shapes.shape = None if way == "plain" else beam
            found = run(scheduler, requests[:level] if turn == 0 else requests, level, engine.target.tokenizer)
            if turn:
                rounds[way].append(found)
    want = rounds["plain"][0]["texts"]
    equal = sum(a == b for found in rounds["speculative"] for a, b in zip(found["texts"], want, strict=True))
    row: dict[str, Any] = {
        "requests_at_once": level,
        "temperature": temperature,
        "beam": beam.label,
        "texts": len(want) * args.rounds,
        "equal": equal,
    }
    for way, every in rounds.items():
        rates = [one["tokens"] / one["seconds"] for one in every]
        row[f"{way}_tokens_per_second"] = round(statistics.median(rates), 1)
        row[f"{way}_rounds"] = [round(rate, 1) for rate in rates]
        for key in ("ttft_ms", "ttft_p99_ms", "tokens_per_step"):
            row[f"{way}_{key}"] = round(statistics.median(one[key] for one in every), 3)
    row["speedup"] = round(
        statistics.median(
            a["tokens"] / a["seconds"] / (b["tokens"] / b["seconds"])
            for a, b in zip(rounds["speculative"], rounds["plain"], strict=True)
        ),
        3,
    )
    return row


def smoke(tiny: TinyFiles) -> list[object]:
    words = [
        "--shape",
        SMOKE,
        "--budget",
        "80M",
        "--model",
        tiny.model,
        "--drafter",
        tiny.drafter,
        "--questions",
        tiny.questions,
        "--device",
        "cpu",
        "--tokens",
        4,
    ]
    return [*words, "--levels", 2, "--requests", 1, "--rounds", 1, "--rows", 2, "--beams", "2=2x2:3"]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "own_gpu.json")
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened model")
    parser.add_argument("--model", help="model to widen (default: the default model)")
    parser.add_argument(
        "--drafter", type=Path, help="folder of its drafter (default: the one that comes with the package)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--levels", type=int, nargs="+", default=[32, 8, 1], help="requests at once")
    parser.add_argument("--beams", nargs="+", default=["32=4x3:7", "8=8x5:15", "1=16x5:63"], metavar="LEVEL=BEAM")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, default=2, help="requests of a round, as a multiple of the level")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--budget", default="120M", help="parameters read per draft step (default 120M)")
    parser.add_argument("--chunk", type=int, help="prompt tokens in a step of others (default: the server's)")
    args = parse(parser, argv, smoke)
    args.beams = {int(level): beam for level, beam in (word.split("=") for word in args.beams)}
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    check_new(args.save, args.overwrite)
    target, drafter, _ = load_wide(
        args.shape, args.device, drafter_budget=args.budget, model=args.model, drafter=args.drafter
    )
    engine = Engine(target, WithNgrams(drafter))
    shapes = FixedSteps(None)
    beams = [Shape.of(beam) for beam in args.beams.values()]
    began = time.perf_counter()
    batch = Batch(target, engine.drafter, rows=args.rows, context=args.context, shapes=beams)
    chunk = args.chunk or ServeConfig().chunk_for(target.device.type)
    if batch.recorded:
        warm_up(batch, ByRows(args.beams), chunk=chunk)
    start = time.perf_counter() - began
    scheduler = Scheduler(batch, shapes, Limits(queue=4 * args.rows, chunk=chunk))
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {"start_s": round(start, 1)}
    for temperature in args.temperatures:
        for level in args.levels:
            row = measure(scheduler, shapes, engine, args, level, temperature)
            rows.append(row | {"chunk": chunk})
            print(rows[-1], flush=True)
            prefix = "" if temperature == 0 else "t1_"
            headline[f"{prefix}tokens_per_second_at_{level}"] = row["speculative_tokens_per_second"]
            headline[f"{prefix}speedup_at_{level}"] = row["speedup"]
            headline["equal"] = sum(r["equal"] for r in rows)
            headline["texts"] = sum(r["texts"] for r in rows)
            write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
