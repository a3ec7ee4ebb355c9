"""Compare answers written under load with plain decoding of each request alone: mixed parameters, some cancelled.

    python benchmarks/serve_equality.py

Every answer finished under load is compared with plain decoding of the same request. Differences at a numerical tie are
counted separately.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/serve_equality.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import Sequence
from typing import Any

from benchmarks.common import arguments, parse
from benchmarks.mixed_load import KINDS, EveryShape, MixedLoad
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.engine import load
from redrafter.engine.ties import explain
from redrafter.results import check_new, write_results
from redrafter.serve.batches import make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.server import build

SHAPES = ("4x4:7", "3x3:5", "1x3:3", "1x1:1")


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions]
    return [*words, "--requests", 4, "--tokens", 6, "--rows", 2, "--seconds", 0.1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "serve_equality.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=60, help="cancel within this time (default 60)")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cancelled", type=float, default=0.2, help="share of requests to cancel")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    engine = load(args.model, args.drafter, shape=Shape())
    shapes = [Shape.of(shape) for shape in SHAPES]
    config = ServeConfig(rows=args.rows, context=1024, queue=2 * args.requests)
    scheduler = build(engine, make_batch(engine, config, shapes), EveryShape(shapes), config).scheduler
    mixed = MixedLoad(engine, args.questions, args.requests, args.tokens)
    finished = mixed.run(scheduler, args.cancelled, args.seconds)
    requests, jobs, answers = mixed.requests, mixed.jobs, mixed.answers
    assert scheduler.batch.free == args.rows
    plain = engine.plain()
    equal = ties = 0
    rows: list[dict[str, Any]] = []
    for i in finished:
        alone = plain.complete([requests[i]])[0].tokens
        found = explain(engine.target, requests[i], alone, answers[i]) if alone != answers[i] else None
        equal += alone == answers[i]
        ties += found is not None and found.is_tie
        rows.append({"request": i, "kind": i % len(KINDS), "tokens": len(answers[i]), "equal": alone == answers[i]})
        if found is not None:
            rows[-1] |= {"token": found.index, "gap": found.gap, "tie": found.is_tie}
    metrics = scheduler.metrics
    headline: dict[str, float] = {
        "requests": len(jobs),
        "finished": len(finished),
        "cancelled": metrics.finished["cancelled"],
        "equal": equal,
        "ties": ties,
        "wrong": len(finished) - equal - ties,
        "prompt_tokens_reused": metrics.reused_tokens,
    }
    write_results(args.save, headline, [*rows, {"steps_by_shape": dict(metrics.steps)}])
    print(headline, dict(metrics.steps))


if __name__ == "__main__":
    main()
