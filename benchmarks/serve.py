"""`redrafter bench serve` against a server that this script starts: on a GPU a small model at a large model's cost.

    python benchmarks/serve.py --save benchmarks/results/serve_cpu.json
    python benchmarks/serve.py --shape vicuna-7b --save benchmarks/results/serve_gpu.json

The server lives in this process, the client in another one, and they meet over HTTP. The client saves after each load;
at the end the server's own measurements (what a step costs by rows and shape) are added to the file.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the commands have it; read when torch is first imported

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from common import QUESTIONS
from redrafter.config import SamplingParams, Shape
from redrafter.engine import Engine, load
from redrafter.results import check_new, command
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.server import Server, build, ladder, make_pool
from redrafter.tuning.batch_cost import measure_profile, warm_up
from redrafter.tuning.chooser import ShapeChooser
from redrafter.tuning.profile import Profile
from redrafter.tuning.store import profile_key
from wide import load_wide

BEGAN = time.perf_counter()


def say(what: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {what}", flush=True)


def make_engine(args: argparse.Namespace) -> tuple[Engine, str]:
    if args.shape is None:
        # A given shape, whichever: what `redrafter tune` found for one row must not take the drafter away.
        engine = load(args.model, args.drafter or "auto", runtime=args.runtime, shape=Shape())
        return engine, Path(engine.target.name).name
    target, drafter, label = load_wide(args.shape, drafter_budget=args.drafter or "120M", model=args.model)
    return Engine(target, drafter, runtime=args.runtime), label


def serve(args: argparse.Namespace) -> tuple[Server, Profile, str]:
    """A server that runs, what it measured before, and what figures made with it are called."""
    say("loading")
    engine, label = make_engine(args)
    config = ServeConfig(rows=args.rows, context=args.context, queue=512, name="target")
    shapes = ladder(engine)
    pool = make_pool(engine, config, shapes)
    say("measuring steps")
    last = [""]

    def report(what: str, done: int, total: int) -> None:
        if what != last[0] or what.startswith("steps"):
            say(f"{what}: {done} of {total}")
        last[0] = what

    profile = measure_profile(engine, pool, shapes, profile_key(engine.target, engine.drafter, engine.runtime), report)
    for row in profile.step_costs:
        if row.rows in (1, args.rows) or torch.cuda.is_available():
            say(f"{row.rows} rows, {row.shape}: {row.ms:.2f} ms")
    chooser = ShapeChooser(profile)
    kinds = [SamplingParams(temperature=args.temperature)]
    if pool.recorded:
        warm_up(pool, chooser.shapes, kinds, report)
    say(f"chosen: {[(c.rows, c.shape and c.shape.budget) for c in profile.best_shapes]}")
    server = Server(build(engine, pool, chooser, config), GuardConfig(), "127.0.0.1", 0, grace=2.0)
    return server, profile, label


def client(args: argparse.Namespace, url: str, label: str) -> int:
    options: dict[str, Any] = {
        "--url": url,
        "--label": label,
        "--tokens": args.tokens,
        "--rounds": args.rounds,
        "--answers": args.answers,
        "--least": args.least,
        "--seconds": args.seconds,
        "--temperature": args.temperature,
        "--prompts": args.questions,
        "--save": args.save,
        "--plot": args.save.with_suffix(".svg"),
    }
    words = [str(word) for pair in options.items() for word in pair]
    loads = ["--concurrency", *map(str, args.concurrency), "--overwrite"]
    return subprocess.run([sys.executable, "-m", "redrafter.cli.main", "bench", "serve", *words, *loads]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="the large model whose cost is paid, e.g. vicuna-7b (default: as it is)")
    parser.add_argument("--model", help="the small model (default: the embedded one)")
    parser.add_argument("--drafter", help="a drafter, or with --shape the size it is widened to (default 120M)")
    parser.add_argument("--runtime", default="auto", help="compiled, graphs or eager")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--least", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="no further round of a load after so long")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    server, profile, label = serve(args)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    say("serving")
    try:
        status = client(args, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", label)
    finally:
        server.handle_exit(15, None)
        thread.join()
    metrics = server.served.scheduler.metrics
    say(f"steps by shape: {dict(metrics.steps)}")
    if status == 0:
        made = json.loads(args.save.read_text())
        made["command"] = command()
        made["rows"] += [
            {"part": "step", "rows": s.rows, "shape": s.shape and vars(s.shape), "ms": s.ms} for s in profile.step_costs
        ]
        made["rows"] += [
            {"part": "choice", "rows": c.rows, "shape": c.shape and vars(c.shape)} for c in profile.best_shapes
        ]
        args.save.write_text(json.dumps(made, indent=1) + "\n")
    say("done")
    sys.exit(status)


if __name__ == "__main__":
    main()
