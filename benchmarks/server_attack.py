"""Attacks on `redrafter serve`: how long a small request takes beside them, and how much memory they take.

    python benchmarks/server_attack.py

Large bodies come all at once; silent connections stay open while small requests are sent. A small request has a prompt
of five tokens and asks for one. It is sent again and again from the same address, and `/health` after each. Memory is
the server's resident memory beyond that before the first attack, when small requests have used the caches of all rows.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/server_attack.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import contextlib
import http.client
import json
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.results import check_new, write_results

PATIENCE = 300.0
"""Seconds until a request is given up."""
WARM = 40
"""Small requests before the first attack: more than the server has rows."""
CLIENTS = 8
"""Clients that send large bodies again and again."""
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
UNITS = {"one letter": '"a"', "words": '"no two words are the same "', "token ids": "[1, 2]", "wrong values": '[1, ""]'}
"""Prompts; what stands between the first and the last sign is repeated."""


def smoke(tiny: TinyFiles) -> list[object]:
    serve = f"--model {tiny.model} --drafter {tiny.drafter} --rows 2 --context 128"
    return ["--prompts", 2, "--megabytes", 0.3, "--silent", 5, "--sustained", 0.2, "--serve", serve]


@contextlib.contextmanager
def running(options: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A server's port and process."""
    words = [sys.executable, "-u", "-m", "redrafter.cli.main", "serve", "--port", "0", "--name", "model"]
    words += ["--request-log", "off", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            lines = iter(server.stdout or ())
            port = next((int(m[1]) for line in lines if (m := re.search(r"page http://[^/]*:(\d+)/", line))), None)
            if port is None:
                sys.exit("the server does not start")
            yield port, server.pid
        finally:
            server.kill()


def body_of(unit: str, size: int) -> bytes:
    """A request whose prompt repeats the unit."""
    many = unit[1:-1] * (size // len(unit[1:-1]))
    if unit[0] == "[":
        many = unit[1:-1] + f", {unit[1:-1]}" * (size // (len(unit[1:-1]) + 2))
    return f'{{"model": "model", "max_tokens": 1, "prompt": {unit[0]}{many}{unit[-1]}}}'.encode()[: size + 200]


def ask(port: int, body: bytes | None = None, path: str = "/v1/completions") -> int:
    """The status of a request, of `/health` without a body; 0 if the server hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        if body is None:
            connection.request("GET", "/health")
        else:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except ConnectionError:
        return 0
    finally:
        connection.close()


class SmallRequests(threading.Thread):
    """Small requests one after another; `least` of them at least."""

    def __init__(self, port: int, least: int) -> None:
        super().__init__()
        self.port, self.least, self.ended = port, least, threading.Event()
        self.seconds: list[float] = []
        self.health_seconds: list[float] = []
        self.refused = 0

    def run(self) -> None:
        small = body_of("[1, 2, 3, 4, 5]", 0)
        while not self.ended.is_set() or len(self.seconds) < self.least:
            for body, seconds in ((small, self.seconds), (None, self.health_seconds)):
                began = time.perf_counter()
                self.refused += ask(self.port, body) != 200
                seconds.append(time.perf_counter() - began)


def measured(name: str, port: int, process: int, attack: Callable[[], Counter[str]], least: int = 3) -> dict[str, Any]:
    """One attack, with small requests from its beginning to its end."""
    small = SmallRequests(port, least)
    began = time.perf_counter()
    small.start()
    statuses = attack()
    small.ended.set()
    small.join()
    return {
        "attack": name,
        "statuses": dict(sorted(statuses.items())),
        "seconds": round(time.perf_counter() - began, 2),
        "small_requests": len(small.seconds),
        "small_refused": small.refused,
        "small_slowest_seconds": round(max(small.seconds), 3),
        "health_slowest_seconds": round(max(small.health_seconds), 3),
        "peak_mb": memory(process, "VmHWM"),
        "after_mb": memory(process, "VmRSS"),
    }


def large_bodies(port: int, body: bytes, count: int) -> Counter[str]:
    """All at once; how many requests had which status."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(ask(port, body))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(map(str, statuses))


def sustained(port: int, path: str, body: bytes, seconds: float) -> Counter[str]:
    """Clients that send the body again and again; how many requests had which status."""
    statuses: list[int] = []
    end = time.perf_counter() + seconds

    def send() -> None:
        while time.perf_counter() < end:
            statuses.append(ask(port, body, path))

    threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(map(str, statuses))


def floods(size: int) -> dict[str, tuple[str, bytes]]:
    """Path and body of each: numbers, token ids, and a schema of a tool, of about so many bytes."""
    numbers = ",".join(["1"] * min(size // 2, 2**20))
    parameters = {"type": "object", "properties": {"a": {"enum": list(range(size // 8))}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked = {"model": "model", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    return {
        "numbers for a response": ("/v1/responses", f'{{"model": "model", "input": [{numbers}]}}'.encode()),
        "ids to decode": ("/detokenize", f'{{"model": "model", "tokens": [{numbers}]}}'.encode()),
        "schema of a tool": ("/v1/chat/completions", json.dumps(asked).encode()),
    }


def silent_connections(port: int, sent: bytes, count: int, seconds: float) -> Counter[str]:
    """Connections that send this and no more, for a while."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(sent)
        time.sleep(seconds)
    return Counter({"silent": count})


def memory(process: int, name: str) -> float:
    """Resident memory (VmRSS) or the most there was (VmHWM), in MB; 0 where there is no /proc."""
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"{name}:\s*(\d+)", status.read_text()) if status.exists() else None
    return round(int(found[1]) / 1024, 1) if found else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[34, 20], help="large bodies at once")
    parser.add_argument("--megabytes", type=float, default=3.99, help="of each of these")
    parser.add_argument("--silent", type=int, default=400, help="silent connections at once")
    parser.add_argument("--sustained", type=float, default=6.0, help="seconds of bodies sent again and again")
    parser.add_argument("--serve", default="", help="more options of `redrafter serve`, as one word")
    parser.add_argument("--save", type=Path, default=HERE / "results" / "server_attack.json")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    attacks: dict[str, Callable[[int], Counter[str]]] = {}
    for count in args.prompts:
        for kind, unit in UNITS.items():
            body = body_of(unit, int(args.megabytes * 2**20))
            attacks[f"{count} prompts, {kind}"] = lambda port, body=body, count=count: large_bodies(port, body, count)  # type: ignore[misc]
    for kind, (path, body) in floods(int(args.megabytes * 2**20)).items():
        attacks[f"{CLIENTS} clients again and again, {kind}"] = lambda port, path=path, body=body: sustained(  # type: ignore[misc]
            port, path, body, args.sustained
        )
    for kind, sent in {"nothing": b"", "half of the headers": BEGUN}.items():
        attacks[f"{args.silent} connections, {kind}"] = lambda port, sent=sent: silent_connections(  # type: ignore[misc]
            port, sent, args.silent, 5.0
        )
    rows = []
    with running(args.serve.split()) as (port, process):
        alone = measured("none", port, process, lambda: Counter(), WARM)
        for name, attack in attacks.items():
            rows.append(measured(name, port, process, lambda attack=attack: attack(port)))  # type: ignore[misc]
            print(json.dumps(rows[-1]), flush=True)
    headline = {
        "before_mb": alone["after_mb"],
        "peak_growth_mb": round(rows[-1]["peak_mb"] - alone["after_mb"], 1),
        "kept_growth_mb": round(rows[-1]["after_mb"] - alone["after_mb"], 1),
        "small_alone_seconds": alone["small_slowest_seconds"],
        "small_slowest_seconds": max(row["small_slowest_seconds"] for row in rows),
        "health_slowest_seconds": max(row["health_slowest_seconds"] for row in rows),
        "small_refused": sum(row["small_refused"] for row in rows),
    }
    write_results(args.save, headline, rows)
    print(json.dumps(headline))


if __name__ == "__main__":
    main()
