"""`redrafter bench serve`: a running server under load, speculative against plain in one run."""

import argparse
import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redrafter.bench.load_test import Client, Figures, Load, Timed, figures, offer, ratio
from redrafter.bench.plot import plot
from redrafter.errors import ConfigError
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.tuning.prompts import PROMPTS

EPILOG = """examples:
  redrafter serve --rows 32 &
  redrafter bench serve
  redrafter bench serve --concurrency 1 8 32 --save load.json
Requests arrive at random (Poisson) at a rate of --pressure times the concurrency for each plain answer's time, and at
most as many as the concurrency are under way. Both contenders get the same prompts at the same moments, in turns. The
ratio is that of the time per token after the first, with a 95 % interval. Leave the machine alone meanwhile."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is (default %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("REDRAFTER_API_KEY"), help="default: $REDRAFTER_API_KEY")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="C", help="default: 1 2 4 8 16 32"
    )
    parser.add_argument("--tokens", type=int, default=64, help="longest answer (default 64)")
    parser.add_argument("--answers", type=int, default=2, metavar="K", help="K·C answers a round (default 2)")
    parser.add_argument("--least", type=int, default=8, help="but at least so many (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="each contender answers all so many times (default 3)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="no further round of a load after so long (default 600)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers (default 0)")
    parser.add_argument("--pressure", type=float, default=2.0, help="how fast requests come (default 2; see below)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="questions as eval takes them (default: some of ours)"
    )
    parser.add_argument("--label", default="", help="what the figures are called, where the model's name would mislead")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the results, after each load")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the ratio and the times over the load")
    parser.add_argument("--overwrite", action="store_true", help="replace those files")


def run(args: argparse.Namespace) -> None:
    if min(args.concurrency) < 1 or args.rounds < 1 or args.tokens < 2 or args.answers < 1 or args.pressure <= 0:
        raise ConfigError("concurrency, rounds and answers must be at least 1, tokens at least 2, pressure above 0")
    for path in (args.save, args.plot):
        if path is not None:
            check_new(path, args.overwrite)
    asyncio.run(LoadTest(args).run())


class LoadTest:
    """The loads so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.client = Client(args.url, args.api_key)
        self.console = Console(highlight=False)
        asked = [q.text for q in read_questions(args.prompts)] if args.prompts else PROMPTS
        self.prompts = list(asked)
        self.rows: list[dict[str, Any]] = []

    async def run(self) -> None:
        self.model = (await self.client.json("/v1/models"))["data"][0]["id"]
        if self.args.label == "":
            self.args.label = self.model
        alone = await self._warm_up()
        for concurrency in sorted(self.args.concurrency):
            await self._load(concurrency, alone)
            self._save()
        self.console.print(table(self.rows))

    def _bodies(self, count: int, seed: int, speculative: bool) -> list[dict[str, Any]]:
        """The next `count` prompts; both contenders get the same in a round, another round goes on from there."""
        return [
            {
                "model": self.model,
                "messages": [{"role": "user", "content": self.prompts[(seed * count + i) % len(self.prompts)]}],
                "max_tokens": self.args.tokens,
                "temperature": self.args.temperature,
                "seed": seed * count + i,
                "stream": True,
                "stream_options": {"include_usage": True},
                "speculative": speculative,
                "reuse": False,  # else the second contender would find prompts that the first has read
            }
            for i in range(count)
        ]

    async def _warm_up(self) -> float:
        """Everything is made once, on both paths; how long a plain answer takes alone."""
        took = 1.0
        for speculative in (True, False):
            for _ in range(2):
                (answer,) = await offer(self.client, Load(concurrency=1, rate=1.0), self._bodies(1, 1, speculative))
                took = answer.ended - answer.sent
        return took

    async def _load(self, concurrency: int, alone: float) -> None:
        args = self.args
        count = max(args.least, args.answers * concurrency)
        rate = args.pressure * concurrency / alone
        runs: dict[bool, list[list[Timed]]] = {True: [], False: []}
        began = time.perf_counter()
        with self.console.status(f"{concurrency} at once") as status:
            for speculative in (True, False):  # so many rows for the first time: recording, caches
                await offer(
                    self.client, Load(concurrency=concurrency, rate=1e6), self._bodies(concurrency, 0, speculative)
                )
            for round_ in range(args.rounds):
                if round_ and time.perf_counter() - began > args.seconds:
                    break
                load = Load(concurrency=concurrency, rate=rate, seed=round_)
                for speculative in (True, False) if round_ % 2 else (False, True):
                    status.update(f"{concurrency} at once, round {round_ + 1} of {args.rounds}")
                    runs[speculative].append(await offer(self.client, load, self._bodies(count, round_, speculative)))
        flat = {kind: [t for run in every for t in run] for kind, every in runs.items()}
        found, low, high = ratio(flat[False], flat[True])
        fast, slow = figures(runs[True]), figures(runs[False])
        self.rows.append(
            {
                "target": args.label,
                "concurrency": concurrency,
                "arrivals_per_second": rate,
                "rounds": len(runs[True]),
                "ratio": found,
                "ratio_low": low,
                "ratio_high": high,
                "throughput_ratio": fast.tokens_per_second / slow.tokens_per_second,
                "equal_texts": sum(a.text == b.text for a, b in zip(flat[True], flat[False], strict=True)),
            }
            | named("speculative", fast)
            | named("plain", slow)
        )
        self.console.print(
            f"{concurrency:3d} at once: {found:.2f}× ({low:.2f} to {high:.2f}), {fast.token_ms:.1f} against "
            f"{slow.token_ms:.1f} ms a token"
        )

    def _save(self) -> None:
        args = self.args
        if args.save is not None:
            write_results(args.save, headline(self.rows), self.rows)
        if args.plot is not None:
            names = {"speculative_token_ms": "speculative", "plain_token_ms": "plain"}
            curves = {name: [(r["concurrency"], r[key]) for r in self.rows] for key, name in names.items()}
            args.plot.write_text(plot(f"{args.label}: time per token", "requests at once", "ms", curves))


def named(name: str, found: Figures) -> dict[str, float]:
    return {f"{name}_{key}": value for key, value in dataclasses.asdict(found).items()}


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Only what was measured."""
    by = {row["concurrency"]: row for row in rows}
    made: dict[str, float] = {"min_ratio_to_plain": round(min(row["ratio"] for row in rows), 4)}
    for concurrency in (1, 32):
        if concurrency in by:
            made[f"ratio_at_{concurrency}"] = round(by[concurrency]["ratio"], 4)
    if 8 in by:
        made["p99_ms_per_token_at_8"] = round(by[8]["speculative_token_ms_p99"], 3)
    return made


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title=rows[0]["target"], title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "", "first", "p99", "ms/tok", "p99", "tok/s", "/step", "ratio, 95 %"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        for name in ("speculative", "plain"):
            get = {key: row[f"{name}_{key}"] for key in Figures.__dataclass_fields__}
            interval = f"{row['ratio']:.2f} {row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
            made.add_row(
                str(row["concurrency"]) if name == "speculative" else "",
                "drafts" if name == "speculative" else name,
                f"{get['first_ms']:.0f}",
                f"{get['first_ms_p99']:.0f}",
                f"{get['token_ms']:.1f}",
                f"{get['token_ms_p99']:.1f}",
                f"{get['tokens_per_second']:.0f}",
                f"{get['tokens_per_step']:.2f}",
                interval if name == "speculative" else "",
            )
    return made
