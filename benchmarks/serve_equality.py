"""Many requests at once against each alone: the real model, mixed parameters, some cancelled.

    python benchmarks/serve_equality.py

Every answer that was finished under load is compared with what plain decoding writes for that request alone; where two
tokens were tied to within rounding, that is said.
"""

import random
import threading
import time
from typing import Any

from common import arguments, first_turns
from redrafter.config import Shape
from redrafter.engine import load
from redrafter.engine.ties import explain
from redrafter.results import check_new, write_results
from redrafter.serve.config import ServeConfig
from redrafter.serve.job import Job, Told
from redrafter.serve.server import build, ladder, make_pool
from redrafter.tuning.chooser import ShapeChooser

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": {198: -5.0}},
    {"stop": ["\n\n", " the"]},
]
SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly and to the point."}


class Ladder(ShapeChooser):
    """All shapes in turn, by the number of rows: here it is equality that counts, not speed."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__(None)
        self.shapes = [*shapes, None]

    def choose(self, rows: int) -> Shape | None:
        return self.shapes[rows % len(self.shapes)]


def main() -> None:
    parser = arguments(__doc__ or "", "serve_equality.json")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cancelled", type=float, default=0.2, help="share of the requests")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    engine = load(shape=Shape())
    shapes = ladder(engine)
    config = ServeConfig(rows=args.rows, context=1024, queue=2 * args.requests)
    scheduler = build(engine, make_pool(engine, config, shapes), Ladder(shapes), config).scheduler
    chance = random.Random(0)
    requests, jobs, told = [], [], []
    for i, messages in enumerate(first_turns(args.questions, args.requests)):
        prompt = [SYSTEM, *messages] if i % 2 else messages
        options = KINDS[i % len(KINDS)] | {"max_new_tokens": chance.randint(4, args.tokens), "seed": i}
        requests += engine.requests([prompt], **options)
        tokens: list[int] = []
        told.append(tokens)

        def listener(heard: Told, tokens: list[int] = tokens) -> None:
            if heard.part is not None:
                tokens += heard.part.tokens

        jobs.append(Job(requests[-1], listener, tokenizer=engine.target.tokenizer, drafts=chance.random() < 0.85))
    scheduler.start()
    for job in jobs:
        scheduler.submit([job])
    for job in jobs:
        if chance.random() < args.cancelled:
            threading.Timer(chance.random() * 60, scheduler.cancel, [[job]]).start()
    while not scheduler.idle:
        time.sleep(0.2)
    scheduler.stop()
    assert scheduler.pool.free == args.rows
    plain = engine.plain()
    equal = ties = 0
    rows = []
    finished = [i for i, job in enumerate(jobs) if job.host.finish_reason is not None]
    for i in finished:
        alone = plain.complete([requests[i]])[0].tokens
        found = explain(engine.target, requests[i], alone, told[i]) if alone != told[i] else None
        equal += alone == told[i]
        ties += found is not None and found.is_tie
        rows.append({"request": i, "kind": i % len(KINDS), "tokens": len(told[i]), "equal": alone == told[i]})
        if found is not None:
            rows[-1] |= {"token": found.index, "gap": found.gap, "tie": found.is_tie}
    metrics = scheduler.metrics
    headline = {
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
