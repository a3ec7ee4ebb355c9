"""Production engines on a GPU: redrafter's drafter inside SGLang or vLLM against their own plain decoding.

    python benchmarks/engines_gpu.py --engine vllm --parts parcels --engines FOLDER     where there is a network
    python benchmarks/engines_gpu.py --engine vllm --engines FOLDER --model MODEL       on the GPU machine

Parts:
    parcels     make FOLDER/p1, FOLDER/p2, ...: the engine, without what is not used
    unpack      the parcels as a folder of packages
    small       the default model: texts with the drafter against plain ones
    wide        the same at 7B cost: tokens/s with 1 to 32 concurrent requests
    arrivals    at 7B cost: requests that arrive at random, by requests per second (not by default)
    own         redrafter's own engine, plain and speculative, at the same levels (not by default)

The engines of a part run at once and take turns, so that one start is waited for. Plain decoding has its CUDA graphs
and overlapped scheduling on. In SGLang both use the Triton attention backend; plain decoding with SGLang's own choice
for a Hopper GPU can be measured beside them: `--also '{"backend": "fa3", "drafts": false}'`. Results are written after
each level. A part that fails leaves the others running.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/engines_gpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import itertools
import json
import subprocess
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.common import HERE, arguments, first_turns, parse
from benchmarks.engines.client import EngineFailed, HereWriter, PlainWriter, Writer, Written
from benchmarks.engines.figures import agreeing, headline, parted, ratios, speed
from benchmarks.engines.kinds import KINDS, REQUESTS, Kind, Pair
from benchmarks.engines.own_process import Own
from benchmarks.engines.twin import write_twin
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import SMOKE, label
from redrafter.bench.load_test import Load
from redrafter.errors import ConfigError
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model

Others = list[tuple[dict[str, Any], Writer]]
"""Further contenders, each with its settings."""
PARTS = ("parcels", "unpack", "small", "wide", "arrivals", "own")
LEVELS = (1, 8, 2, 4, 16, 32)
"""Concurrent requests, the most telling first: time on a GPU may end."""
RATES = (1.0, 4.0, 16.0)
"""Requests per second of the part `arrivals`."""
TEXTS = 4
"""Texts of a level for each concurrent request: with two, a level is mostly its beginning and its end."""
MOST_PARTINGS = 50
"""Of 1000 tokens. In bf16 a correct engine's texts begin to differ at ties about 14 times (docs/experiments.md); with a
wrong mask or position they do within a few tokens of each text."""


class EnginesBenchmark:
    """The engines and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, list[dict[str, Any]]()
        self.began = time.monotonic()
        self.kind = KINDS[args.engine]
        if args.device == "cpu":  # a smoke run
            self.kind = replace(self.kind, label=f"redrafter in place of {self.kind.label}")
        self.settings: dict[str, Any] = json.loads(args.settings)
        self.profile = {"timing": args.profile} if args.profile else {}
        self.model = Path(args.model or default_model()).expanduser()
        self.twin: subprocess.Popen[bytes] | None = None
        self.questions = tokenised(self.model, args.questions)

    def run(self) -> bool:
        """Run all parts; return whether none failed."""
        parts = {"small": self.small, "wide": self.wide, "arrivals": self.wide, "own": self.own}
        failed = False
        for part in dict.fromkeys(parts[name] for name in PARTS if name in parts and name in self.args.parts):
            try:
                part()
            except Exception as error:  # an engine or a mistake of ours: time on the machine is too dear to end here
                traceback.print_exc()
                self.failed(part.__name__, {}, error)
                failed = True
        return not failed

    def failed(self, part: str, settings: dict[str, Any], error: Exception) -> None:
        first, *lines = str(error).splitlines() or [type(error).__name__]
        self.rows.append({"part": part, "settings": settings, "failed": first, "log": lines[-15:]})
        self.save()

    def pair(self, kind: Kind, pair: Pair, name: str) -> tuple[Writer, Writer]:
        """Plain and speculative decoding of one model."""
        if self.args.device != "cpu":
            return kind.start(pair, self.args.engines, name, self.args.patience)
        own = {"model": pair.model, "drafter": pair.drafter, "device": "cpu", "dtype": "fp32", "runtime": "auto"}
        engine = HereWriter(Own(own | {"rows": 8, "context": 256, "shape": pair.beam}))
        return PlainWriter(engine), engine

    def small(self) -> None:
        """Texts of the default model, with settings that work. The twin is written meanwhile."""
        if {"wide", "arrivals", "own"} & set(self.args.parts):
            self.start_twin()
        for settings in self.kind.fallbacks if not self.settings else (self.settings,):
            pair = Pair(model=self.model, drafter=self.args.drafter, settings=settings, **self.shapes)
            plain, speculative = self.pair(self.kind, pair, "small")
            try:
                right = self.compare(plain, speculative, settings)
            except EngineFailed as error:
                print(error, flush=True)
                self.failed("small", settings, error)
                right = False
            finally:
                plain.close()
                speculative.close()
            self.save()
            if right:
                self.settings = settings
                return
        raise ConfigError("no settings gave the texts of plain decoding; see the rows of the results")

    def compare(self, plain: Writer, speculative: Writer, settings: dict[str, Any]) -> bool:
        """Whether texts part no more often than ties explain."""
        partings = tokens = 0
        kinds = (("greedy", 2, 1), ("seeded", 2, 1), ("greedy", 8, 8))
        for kind, count, concurrency in (k for k in kinds if self.kind.seeded or k[0] == "greedy"):
            prompts = self.prompts(count)
            sampling = self.sampling(count, 0.0 if kind == "greedy" else 1.0)
            one, two = (w.write(prompts, sampling, concurrency) for w in (plain, speculative))
            found = parted(one.texts, two.texts)
            row = {"part": "small", "engine": self.kind.described(settings), "texts": kind, "concurrency": concurrency}
            agree = sum(agreeing(a, b) for a, b in zip(one.texts, two.texts, strict=True))
            row |= {"settings": settings, "count": count, "equal": count - len(found), "parted_at": found}
            row |= {"agreeing_tokens": agree, "tokens_per_step": two.tokens_per_step, "tokens": two.tokens}
            print(row, flush=True)
            self.rows.append(row)
            partings, tokens = partings + len(found), tokens + agree
        return 1000 * partings <= MOST_PARTINGS * tokens

    def wide(self) -> None:
        """tokens/s of both engines at every level, and with arrivals by requests per second."""
        with ExitStack() as opened:
            plain, speculative = self.wide_pair(self.kind, self.settings | self.profile, "wide")
            opened.callback(plain.close)
            opened.callback(speculative.close)
            if "wide" in self.args.parts:
                with ExitStack() as further:
                    self.levels("wide", self.kind, plain, speculative, self.others(further))
            if "arrivals" in self.args.parts:
                self.arrivals(plain, speculative)

    def others(self, opened: ExitStack) -> Others:
        """Further contenders of the part `wide`."""
        made: Others = []
        for number, settings in enumerate(self.args.also):
            pair = self.wide_model(self.settings | self.profile | settings)
            made.append((settings, self.other(pair, f"also-{number}")))
            opened.callback(made[-1][1].close)
        return made

    def other(self, pair: Pair, name: str) -> Writer:
        if self.args.device != "cpu":
            return self.kind.other(pair, self.args.engines, name, self.args.patience)
        plain, speculative = self.pair(self.kind, pair, name)
        return speculative if pair.settings.get("drafts", True) else plain

    def own(self) -> None:
        """tokens/s of redrafter's own engine at every level."""
        plain, speculative = self.wide_pair(KINDS["own"], json.loads(self.args.own), "own")
        try:
            self.levels("own", KINDS["own"], plain, speculative, [])
        finally:
            plain.close()
            speculative.close()

    def wide_pair(self, kind: Kind, settings: dict[str, Any], name: str) -> tuple[Writer, Writer]:
        self.write_twin()
        return self.pair(kind, self.wide_model(settings), name)

    def wide_model(self, settings: dict[str, Any]) -> Pair:
        drafter = f"{self.args.twin / 'drafter'}+ngram"
        return Pair(model=self.args.twin / "model", drafter=drafter, settings=settings, **self.shapes)

    def levels(self, part: str, kind: Kind, plain: Writer, speculative: Writer, others: Others) -> None:
        alone: dict[float, list[list[int]]] = {}
        for temperature, level in itertools.product(self.args.temperatures, self.args.levels):
            if self.too_late(0.0):
                print(f"no time for {level} requests at once at temperature {temperature:g}", flush=True)
                continue
            count = max(self.args.requests, TEXTS * level)
            prompts, sampling = self.prompts(count), self.sampling(count, temperature)
            row = self.row(part, kind) | {"concurrency": level, "texts": count, "temperature": temperature}
            done = self.turns([plain, speculative], others, (prompts, sampling, level))
            for name, rounds in zip(("plain", "redrafter"), done, strict=False):
                row |= {f"{name}_tokens_per_s": speed(rounds), f"{name}_tokens": rounds[-1].tokens}
                row[f"{name}_tokens_per_step"] = rounds[-1].tokens_per_step
            row["ratios"] = ratios(done[0], done[1])
            row["ratio"] = median(row["ratios"])
            row["also"] = [
                {
                    "settings": settings,
                    "tokens_per_s": speed(rounds),
                    "tokens_per_step": rounds[-1].tokens_per_step,
                    "ratios": ratios(done[0], rounds),
                }
                for (settings, _), rounds in zip(others, done[2:], strict=True)
            ]
            if kind.seeded or not temperature:
                written, drafted = done[0][-1].texts, done[1][-1].texts
                row["parted_at"] = parted(written, drafted)
                row["equal"] = count - len(row["parted_at"])
                first = alone.setdefault(temperature, written)
                both = min(len(first), count)
                row["plain_equal_to_first_level"] = both - len(parted(first[:both], written[:both]))
            self.keep(row)

    def turns(self, both: Sequence[Writer], others: Others, asked: tuple[Any, ...]) -> list[list[Written]]:
        """What each engine wrote, round by round. They take turns; the first round compiles and measures step times.

        A further contender that fails is left out from then on.
        """
        done: dict[Writer, list[Written]] = {writer: [] for writer in (*both, *(w for _, w in others))}
        for _ in range(1 + self.args.rounds):
            for writer in both:
                done[writer].append(writer.write(*asked))
            for settings, writer in tuple(others):
                try:
                    done[writer].append(writer.write(*asked))
                except EngineFailed as error:
                    print(error, flush=True)
                    self.failed("wide", settings, error)
                    others.remove((settings, writer))
                    del done[writer]
        return [rounds[1:] for rounds in done.values()]

    def arrivals(self, plain: Writer, speculative: Writer) -> None:
        """Both engines get the same requests at the same times. A user's speed is tokens / (end - arrival)."""
        seconds = self.args.duration
        warm = min(REQUESTS, round(max(self.args.rates) * seconds))
        for writer in (plain, speculative):
            writer.write(self.prompts(warm), self.sampling(warm, 0.0), REQUESTS)
        for rate in self.args.rates:
            if self.too_late(2 * seconds):
                print(f"no time for {rate:g} requests per second", flush=True)
                continue
            count = max(2, round(rate * seconds))
            moments = Load(concurrency=REQUESTS, rate=rate, seed=self.args.seed).arrivals(count)
            row = self.row("arrivals", self.kind) | {"requests_per_s": rate, "seed": self.args.seed, "texts": count}
            for name, writer in (("plain", plain), ("redrafter", speculative)):
                done = writer.write(self.prompts(count), self.sampling(count, 0.0), REQUESTS, moments)
                row[f"{name}_request_tokens_per_s"] = done.tokens_per_second_of_a_request
                row[f"{name}_under_way"] = sum(done.latencies) / done.seconds
                row[f"{name}_latency_s"] = sum(done.latencies) / count
                row[f"{name}_tokens_per_step"] = done.tokens_per_step
            row["ratio"] = row["redrafter_request_tokens_per_s"] / row["plain_request_tokens_per_s"]
            self.keep(row)

    def row(self, part: str, kind: Kind) -> dict[str, Any]:
        """The first columns of a row of figures."""
        settings = json.loads(self.args.own) if part == "own" else self.settings
        given = {"part": part, "engine": kind.described(settings), "model": label(self.args.shape)}
        return given | {"settings": settings} | ({} if part == "own" else self.shapes)

    def keep(self, row: dict[str, Any]) -> None:
        print({k: v for k, v in row.items() if k != "parted_at"}, flush=True)
        self.rows.append(row)
        self.save()

    def too_late(self, needed: float) -> bool:
        return bool(time.monotonic() - self.began + needed > self.args.seconds)

    @property
    def shapes(self) -> dict[str, Any]:
        return {"beam": self.args.beam, "depth": self.args.depth}

    def start_twin(self) -> None:
        if self.args.device != "cpu" and self.twin is None:
            words = [sys.executable, HERE / "engines" / "twin.py", "--out", self.args.twin]
            words += ["--model", self.model, "--shape", self.args.shape, "--budget", self.args.budget]
            self.twin = subprocess.Popen(list(map(str, words)))

    def write_twin(self) -> None:
        args = self.args
        if args.device == "cpu":
            return write_twin(args.twin, args.shape, "cpu", args.budget, str(self.model), Path(args.drafter), "fp32")
        self.start_twin()
        if self.twin is not None and self.twin.wait() != 0:
            raise ConfigError("the twin could not be written; see the output above")
        return None

    def prompts(self, count: int) -> list[list[int]]:
        return [self.questions[i % len(self.questions)] for i in range(count)]

    def sampling(self, count: int, temperature: float) -> list[dict[str, Any]]:
        given = {"temperature": temperature, "max_new_tokens": self.args.tokens}
        return [given | {"sampling_seed": i} for i in range(count)]

    def save(self) -> None:
        write_results(self.args.save, headline(self.rows), self.rows)


def tokenised(model: Path, questions: Path) -> list[list[int]]:
    """The first turns of all questions in the model's chat template, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    given = first_turns(questions, len(questions.read_text().splitlines()))
    return [list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)) for t in given]


def budget(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions, "--device", "cpu"]
    words += ["--engines", tiny.new_folder(), "--shape", SMOKE, "--budget", 200_000, "--beam", "2x2:3"]
    words += ["--parts", "small", "wide", "arrivals", "own", "--levels", 1, 2, "--tokens", 4, "--requests", 2]
    words += ["--also", '{"adaptive": false}', "--temperatures", 0, 1]
    return [*words, "--rounds", 1, "--rates", 40, "--duration", 0.1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "sglang_gpu.json")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["unpack", "small", "wide"])
    parser.add_argument("--engines", type=Path, default=Path.home() / "engines", help="folder of the engine's parcels")
    parser.add_argument("--twin", type=Path, help="folder of the widened model (default: ENGINES/twin)")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto", help="the small target's drafter")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened target")
    parser.add_argument("--budget", type=budget, default="100M", help="parameters of the widened drafter")
    parser.add_argument("--beam", default="16x5:63", help="shape of the largest tree")
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted per step in vLLM, which verifies a chain")
    parser.add_argument("--settings", default="{}", help="settings of the plug-in (default: tried until one works)")
    parser.add_argument(
        "--profile", type=int, default=0, help="vLLM: log where the time goes, after so many steps (slows them)"
    )
    parser.add_argument(
        "--also",
        type=json.loads,
        nargs="+",
        default=[],
        help='settings of further contenders of the part `wide`; with "drafts": false one that decodes plainly',
    )
    parser.add_argument("--own", default="{}", help='settings of the part `own`, such as {"runtime": "graphs"}')
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), help="concurrent requests")
    parser.add_argument("--requests", type=int, default=8, help="requests of a level, at least")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a level, after one that warms up")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the parts `wide` and `own`")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests per second")
    parser.add_argument("--duration", type=float, default=10, help="seconds in which the requests of a rate arrive")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    parser.add_argument("--patience", type=float, default=200, help="seconds to wait for an engine's answer")
    parser.add_argument("--seconds", type=float, default=500, help="begin no level after this time")
    args = parse(parser, argv, smoke)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.engines = args.engines.expanduser()
    args.twin = (args.twin or args.engines / "twin").expanduser()
    if args.save == parser.get_default("save"):
        args.save = args.save.with_name(f"{args.engine}_gpu.json")
    parcels = KINDS[args.engine].parcels
    assert parcels is not None
    args.engines.mkdir(parents=True, exist_ok=True)
    if args.parts == ["parcels"]:
        parcels.build(args.engines)
        return
    if args.parts == ["unpack"]:
        parcels.unpack(args.engines)
        return
    check_new(args.save, args.overwrite)
    if "unpack" in args.parts:
        parcels.unpack(args.engines)
    if not EnginesBenchmark(args).run():
        raise SystemExit("a part failed; the results say which and the end of its log")


if __name__ == "__main__":
    main()
