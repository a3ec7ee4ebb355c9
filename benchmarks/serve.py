r"""Run `redrafter bench serve` against a server that this script starts, on a GPU with a widened model.

    python benchmarks/serve.py --context 512 --tokens 48 --answers 1 --rounds 10 --seconds 150 \
        --save benchmarks/results/serve_cpu.json
    python benchmarks/serve.py --shape vicuna-7b --save benchmarks/results/serve_gpu.json

The server runs in this process, the client in another one; they communicate over HTTP. The client saves its results
after each load. At the end, what steps cost is added to the file: on a GPU as measured beforehand by rows and shape, on
a CPU as the server learned it.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/serve.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import os
from collections.abc import Sequence

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the CLI; read when torch is first imported

import argparse
import json
import subprocess
import threading
import time
from typing import Any

from benchmarks.common import QUESTIONS, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import load_wide
from redrafter.config import SamplingParams, Shape
from redrafter.drafters import WithNgrams
from redrafter.engine import Engine, load
from redrafter.planning.steps import FixedSteps, Steps
from redrafter.results import check_new, command
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.server import Server, build_planned
from redrafter.tuning.at_rest import warm_up

BEGAN = time.perf_counter()


def say(what: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {what}", flush=True)


def make_engine(args: argparse.Namespace) -> tuple[Engine, str]:
    if args.shape is None:
        # An explicit shape, so that a profile of `redrafter tune` cannot turn drafting off.
        loaded = load(args.model, args.drafter or "auto", runtime=args.runtime, shape=Shape())
        return Engine(loaded.target, loaded.drafter, runtime=args.runtime), Path(loaded.target.name).name
    target, drafter, label = load_wide(args.shape, drafter_budget=args.drafter or "120M", model=args.model)
    return Engine(target, WithNgrams(drafter), runtime=args.runtime), label


def serve(args: argparse.Namespace) -> tuple[Server, str]:
    """A server, and the label of its figures."""
    say("loading")
    engine, label = make_engine(args)
    config = ServeConfig(rows=args.rows, context=args.context, queue=512, name="target")
    served = build_planned(engine, config)
    if served.scheduler.batch.recorded:
        say("recording steps")
        warm_up(served.scheduler.batch, served.scheduler.policy, [SamplingParams(temperature=args.temperature)])
    return Server(served, GuardConfig(), "127.0.0.1", 0, grace=2.0), label


def step_rows(policy: Steps) -> list[dict[str, Any]]:
    """What steps cost: milliseconds as the planner learned them."""
    assert not isinstance(policy, FixedSteps)
    costs = policy.planner.costs
    return [
        {"part": "cost", "tokens": tokens, "pass_ms": round(1e3 * costs.of_pass(tokens), 3)}
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ] + [{"part": "cost", "draft_levels": n, "ms": round(1e3 * costs.of_draft(1, 1, n), 3)} for n in (1, 4)]


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


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions]
    words += ["--rows", 2, "--context", 256, "--concurrency", 1, "--tokens", 4, "--rounds", 1, "--answers", 1]
    return [*words, "--least", 1, "--save", tiny.new_folder() / "serve.json"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--shape", help="shape of the widened target, e.g. vicuna-7b (default: not widened)")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", help="drafter folder, or with --shape its budget (default 120M)")
    parser.add_argument("--runtime", default="auto", help="compiled, graphs or eager")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--least", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=60, help="start no further round of a load after this many seconds"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    server, label = serve(args)
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
        made["rows"] += step_rows(server.served.scheduler.policy)
        args.save.write_text(json.dumps(made, indent=1) + "\n")
    say("done")
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
