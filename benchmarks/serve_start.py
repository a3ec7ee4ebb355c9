"""From the command `redrafter serve` to its first answer, each time in a new process.

    python benchmarks/serve_start.py

The request is sent again and again from the beginning on, so the clock stops with the first answer. CPU seconds are
those of the server's process until then; other work on the machine makes the wall-clock time longer, and these hardly.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/serve_start.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import http.client
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence

from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.results import check_new, write_results

PATIENCE = 120.0
"""Seconds until a server that does not answer is given up."""


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--runs", 1, "--serve", f"--model {tiny.model} --drafter {tiny.drafter} --rows 2 --context 128"]


def first_answer(options: Sequence[str]) -> dict[str, float]:
    """Start a server and ask until it answers."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    words = [sys.executable, "-m", "redrafter.cli.main", "serve", "--port", str(port), "--name", "model", *options]
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            while not answers(port):
                if server.poll() is not None or time.perf_counter() - began > PATIENCE:
                    server.kill()
                    sys.exit(f"the server does not answer: {server.stderr.read() if server.stderr else ''}")
                time.sleep(0.02)
            return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds(server.pid)}
        finally:
            server.terminate()


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = {"model": "model", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:  # not listening yet
        return False
    finally:
        connection.close()


def cpu_seconds(process: int) -> float:
    """User and system time of a running process; 0 where there is no /proc."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    ticks = stat.read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", default="", help="more options of `redrafter serve`, as one word")
    parser.add_argument("--save", type=Path, default=HERE / "results" / "serve_start.json")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    rows = []
    for _ in range(args.runs):
        rows.append({name: round(value, 2) for name, value in first_answer(args.serve.split()).items()})
        print(rows[-1], flush=True)
    seconds = sorted(row["seconds"] for row in rows)
    cpu = statistics.median(row["cpu_seconds"] for row in rows)
    headline = {"median_seconds": statistics.median(seconds), "least_seconds": seconds[0], "median_cpu_seconds": cpu}
    write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
