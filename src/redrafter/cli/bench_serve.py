"""`redrafter bench serve`: load-tests a running server, speculative against plain decoding in one run."""

import argparse
import asyncio
import dataclasses
import os
import time
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from redrafter.bench.load_test import MIN_ROUNDS, Client, Figures, Load, Timed, figures, offer, ratio
from redrafter.bench.plot import plot_loads
from redrafter.bounds import Bounds, Count, NotNegative, Positive, Seconds
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.paths import InputFile, OutputFile
from redrafter.cli.progress import waiting
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results

EPILOG = """examples:
  redrafter serve --rows 32 &
  redrafter bench serve
  redrafter bench serve --concurrency 1 8 32 --save load.json
Requests arrive at random (a Poisson process) at a rate of --pressure times the concurrency, divided by the time of one
plain answer. At most C requests run at once. Both contenders get the same prompts at the same arrival times, in turns.
The ratio compares the time per token after the first, with a 95 % bootstrap interval over rounds (over answers if there
are fewer than five rounds). Run nothing else on the machine."""

Concurrency = Annotated[int, Bounds(least=1, most=2**14)]
Tokens = Annotated[int, Bounds(least=2, most=2**31 - 1)]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (default %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("REDRAFTER_API_KEY"), help="default: $REDRAFTER_API_KEY")
    add_value(
        parser,
        "--concurrency",
        tuple[Concurrency, ...],
        default=[1, 2, 4, 8, 16, 32],
        metavar="C",
        help="requests at once (default 1 2 4 8 16 32)",
    )
    add_value(parser, "--tokens", Tokens, default=64, help="maximum number of tokens of an answer (default 64)")
    help_ = "K times C answers in each round (default 2)"
    add_value(parser, "--answers", Annotated[int, Bounds(least=1, most=2**16)], default=2, metavar="K", help=help_)
    add_value(
        parser,
        "--least",
        Annotated[int, Bounds(least=1, most=2**20)],
        default=8,
        help="minimum number of answers in a round (default 8)",
    )
    add_value(parser, "--rounds", Count, default=3, help="rounds for each concurrency (default 3)")
    add_value(parser, "--seconds", Seconds, default=600, help="start no further round after this time (default 600)")
    add_value(parser, "--temperature", NotNegative, default=0.0, metavar="T", help="sampling temperature (default 0)")
    add_value(parser, "--pressure", Positive, default=2.0, help="arrival rate (default 2; see below)")
    add_value(parser, "--prompts", InputFile, help="a file of questions as for eval (default: a built-in list)")
    parser.add_argument("--label", default="", help="name for the results (default: the model's name)")
    add_value(parser, "--save", OutputFile, metavar="JSON", help="write the results, after each concurrency")
    add_value(parser, "--plot", OutputFile, metavar="SVG", help="plot the time per token over the concurrency")
    parser.add_argument("--overwrite", action="store_true", help="allow replacing these files")


def run(args: argparse.Namespace) -> None:
    for path in (args.save, args.plot):
        if path is not None:
            check_new(path, args.overwrite)
    asyncio.run(LoadTest(args).run())


class LoadTest:
    """One run: every concurrency in turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.client = Client(args.url, args.api_key)
        self.console = Console()
        self.prompts = [q.text for q in read_questions(args.prompts)] if args.prompts else own_prompts()
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
        """The next `count` prompts: the same for both contenders in a round, others in the next round."""
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
                "reuse": False,  # else the second contender would reuse the prompt cache of the first
            }
            for i in range(count)
        ]

    async def _warm_up(self) -> float:
        """Warm up both paths. Returns the seconds of one plain answer without other load."""
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
        with waiting(self.console, f"{concurrency} at once") as say:
            for speculative in (True, False):  # warm up this number of rows
                await offer(
                    self.client, Load(concurrency=concurrency, rate=1e6), self._bodies(concurrency, 0, speculative)
                )
            for round_ in range(args.rounds):
                if round_ and time.perf_counter() - began > args.seconds:
                    break
                load = Load(concurrency=concurrency, rate=rate, seed=round_)
                for speculative in (True, False) if round_ % 2 else (False, True):
                    say(f"{concurrency} at once, round {round_ + 1} of {args.rounds}")
                    runs[speculative].append(await offer(self.client, load, self._bodies(count, round_, speculative)))
        flat = {kind: [t for run in every for t in run] for kind, every in runs.items()}
        found, low, high = ratio(runs[False], runs[True])
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
                "interval_over": "rounds" if len(runs[True]) >= MIN_ROUNDS else "answers",
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
            args.plot.write_text(plot_loads(args.label, self.rows))


def own_prompts() -> list[str]:
    from redrafter.tuning.prompts import PROMPTS

    return list(PROMPTS)


def named(name: str, found: Figures) -> dict[str, float]:
    return {f"{name}_{key}": value for key, value in dataclasses.asdict(found).items()}


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of the concurrencies that were measured."""
    by = {row["concurrency"]: row for row in rows}
    worst = min(rows, key=lambda row: float(row["ratio"]))
    made = {f"min_ratio_to_plain{end}": round(float(worst[f"ratio{end}"]), 4) for end in ("", "_low", "_high")}
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
