"""SGLang on a GPU: REDRAFTER against its own plain decoding, texts compared, at a larger model's cost.

    python benchmarks/engines_gpu.py --parts parcels --engines FOLDER     where there is a network: FOLDER/p1, FOLDER/p2
    python benchmarks/engines_gpu.py --engines FOLDER --model MODEL       on the GPU machine, with p1 and p2 in FOLDER

Parts: `unpack`; `small` (the default model: greedy and seeded texts of REDRAFTER against SGLang's plain ones); `wide`
(the same at 7B cost: tokens/s with 1 to 32 concurrent requests). Both engines of a part run at once and take turns, so
that one start is waited for. Plain SGLang has its CUDA graphs and overlapped scheduling on; both use the Triton
attention backend, because the kernels of the others are too large to send. Results are written after each level.
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
from collections.abc import Sequence
from typing import Any

from benchmarks.common import HERE, arguments, first_turns, parse
from benchmarks.engines import parcels
from benchmarks.engines.client import EngineFailed, OwnWriter, SglangWriter, Writer
from benchmarks.engines.twin import write_twin
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import SMOKE, label
from redrafter import Engine, Shape
from redrafter.drafters import RecurrentDrafter
from redrafter.drafters.none import NoDrafter
from redrafter.errors import ConfigError
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.targets.default import default_model

ENGINE = "SGLang 0.5.16, Triton attention"
PARTS = ("parcels", "unpack", "small", "wide")
LEVELS = (1, 8, 2, 4, 16, 32)
"""Concurrent requests, the most telling first: time on a GPU may end."""
FALLBACKS: tuple[dict[str, Any], ...] = (
    {},
    {"adaptive": False},
    {"adaptive": False, "graphs": False},
    {"adaptive": False, "graphs": False, "host_lengths": True},
)
"""Settings of the plug-in, tried in this order until it starts and writes the right texts."""
MOST_PARTINGS = 50
"""Of 1000 tokens. In bf16 a correct engine's texts part at ties about 14 times (bf16_divergence.json), a wrong mask's
or position's within a few tokens of each text."""


class EnginesBenchmark:
    """The engines and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, list[dict[str, Any]]()
        self.began = time.monotonic()
        self.settings: dict[str, Any] = json.loads(args.settings)
        self.model = Path(args.model or default_model()).expanduser()
        self.twin: subprocess.Popen[bytes] | None = None
        self.questions = tokenised(self.model, args.questions)

    def pair(self, model: Path, drafter: str, settings: dict[str, Any], name: str) -> tuple[Writer, Writer]:
        """Plain and speculative decoding of one model; both engines start at once."""
        if self.args.device == "cpu":
            return own_pair(model, drafter, self.args.beam)
        plain = self.sglang(f"{name}-plain", model, {}, {})
        speculative = {
            "speculative_algorithm": "REDRAFTER",
            "speculative_num_draft_tokens": Shape.of(self.args.beam).budget + 1,
            "enable_return_hidden_states": True,
        }
        given = {"drafter": drafter, "shape": self.args.beam} | settings
        return plain, self.sglang(f"{name}-redrafter", model, speculative, given)

    def sglang(self, name: str, model: Path, options: dict[str, Any], settings: dict[str, Any]) -> SglangWriter:
        environment = parcels.environment(self.args.engines, HERE.parent)
        environment["REDRAFTER_SGLANG"] = json.dumps(settings)
        self.ports = getattr(self, "ports", 30000) + 500
        engine = {
            "model_path": str(model),
            "dtype": "bfloat16",
            "attention_backend": "triton",
            "sampling_backend": "redrafter",  # draws by seed, so that sampled texts can be compared
            "grammar_backend": "none",
            "mem_fraction_static": 0.8,
            "max_total_tokens": 32768,  # both engines' caches fit beside each other
            "context_length": 2048,
            "max_running_requests": 32,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32],
            "disable_prefill_cuda_graph": True,
            "disable_custom_all_reduce": True,
            "skip_server_warmup": True,
            "random_seed": 0,
            "log_level": "info",
            "port": self.ports,
        }
        logs = self.args.engines / "logs"
        logs.mkdir(exist_ok=True)
        return SglangWriter(engine | options, environment, logs / f"{name}.log", self.args.patience)

    def small(self) -> None:
        """Texts of the default model, with settings that work. The twin is written meanwhile."""
        if "wide" in self.args.parts:
            self.start_twin()
        for settings in FALLBACKS if not self.settings else (self.settings,):
            plain, speculative = self.pair(self.model, self.args.drafter, settings, "small")
            try:
                right = self.compare(plain, speculative, settings)
            except EngineFailed as error:
                print(error, flush=True)
                self.rows.append({"part": "small", "settings": settings, "failed": str(error).splitlines()[0]})
                right = False
            finally:
                plain.close()
                speculative.close()
            self.save()
            if right:
                self.settings = settings
                return
        raise ConfigError("REDRAFTER wrote the texts of plain SGLang with no settings; see the rows of the results")

    def compare(self, plain: Writer, speculative: Writer, settings: dict[str, Any]) -> bool:
        """Whether texts part no more often than ties explain."""
        partings = tokens = 0
        for kind, count, concurrency in (("greedy", 2, 1), ("seeded", 2, 1), ("greedy", 8, 8)):
            prompts = self.prompts(count)
            sampling = self.sampling(count, 0.0 if kind == "greedy" else 1.0)
            one, two = (w.write(prompts, sampling, concurrency) for w in (plain, speculative))
            found = parted(one.texts, two.texts)
            row = {"part": "small", "engine": ENGINE, "texts": kind, "concurrency": concurrency, "settings": settings}
            agree = sum(agreeing(a, b) for a, b in zip(one.texts, two.texts, strict=True))
            row |= {"count": count, "equal": count - len(found), "parted_at": found, "agreeing_tokens": agree}
            row |= {"tokens_per_step": two.tokens_per_step, "tokens": two.tokens}
            print(row, flush=True)
            self.rows.append(row)
            partings, tokens = partings + len(found), tokens + agree
        return 1000 * partings <= MOST_PARTINGS * tokens

    def wide(self) -> None:
        """tokens/s of both engines at every level."""
        self.write_twin()
        folder = self.args.engines / "twin"
        plain, speculative = self.pair(folder / "model", f"{folder / 'drafter'}+ngram", self.settings, "wide")
        alone: list[list[int]] = []
        try:
            for level in self.args.levels:
                if time.monotonic() - self.began > self.args.seconds:
                    print(f"no time for {level} requests at once", flush=True)
                    continue
                count = max(self.args.requests, 2 * level)
                prompts, sampling = self.prompts(count), self.sampling(count, 0.0)
                row: dict[str, Any] = {"part": "wide", "engine": ENGINE, "model": label(self.args.shape)}
                row |= {"concurrency": level}
                row |= {"settings": self.settings, "beam": self.args.beam, "texts": count}
                texts = {}
                for name, writer in (("plain", plain), ("redrafter", speculative)):
                    writer.write(prompts, sampling, level)  # compiles, fills caches, measures step times
                    done = writer.write(prompts, sampling, level)
                    texts[name] = done.texts
                    row |= {f"{name}_tokens_per_s": done.tokens / done.seconds, f"{name}_tokens": done.tokens}
                    row[f"{name}_tokens_per_step"] = done.tokens_per_step
                row["ratio"] = row["redrafter_tokens_per_s"] / row["plain_tokens_per_s"]
                row["parted_at"] = parted(texts["plain"], texts["redrafter"])
                row["equal"] = count - len(row["parted_at"])
                alone = alone or texts["plain"]
                both = min(len(alone), count)
                row["plain_equal_to_first_level"] = both - len(parted(alone[:both], texts["plain"][:both]))
                print({k: v for k, v in row.items() if k != "parted_at"}, flush=True)
                self.rows.append(row)
                self.save()
        finally:
            plain.close()
            speculative.close()

    def start_twin(self) -> None:
        if self.args.device != "cpu" and self.twin is None:
            words = [sys.executable, HERE / "engines" / "twin.py", "--out", self.args.engines / "twin"]
            words += ["--model", self.model, "--shape", self.args.shape, "--budget", self.args.budget]
            self.twin = subprocess.Popen(list(map(str, words)))

    def write_twin(self) -> None:
        args, folder = self.args, self.args.engines / "twin"
        if args.device == "cpu":
            drafter = Path(args.drafter)
            return write_twin(folder, args.shape, "cpu", args.budget, str(self.model), drafter, dtype="fp32")
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
        levels = [r for r in self.rows if r["part"] == "wide"]
        texts = [r for r in self.rows if r["part"] == "small" and "equal" in r]
        headline: dict[str, float] = {}
        if texts:
            headline["small_equal"] = sum(r["equal"] for r in texts) / sum(r["count"] for r in texts)
            partings = sum(len(r["parted_at"]) for r in texts)
            headline["small_partings_per_1000_tokens"] = (
                1000 * partings / max(1, sum(r["agreeing_tokens"] for r in texts))
            )
        for r in levels:
            headline[f"ratio_at_{r['concurrency']}"] = r["ratio"]
            if r["concurrency"] == 1:
                headline["tokens_per_step"] = r["redrafter_tokens_per_step"]
        if levels:
            headline["min_ratio_to_plain"] = min(r["ratio"] for r in levels)
            headline["equal"] = sum(r["equal"] for r in levels) / sum(r["texts"] for r in levels)
        write_results(self.args.save, headline, self.rows)


def tokenised(model: Path, questions: Path) -> list[list[int]]:
    """The first turns of all questions in the model's chat template, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = first_turns(questions, len(questions.read_text().splitlines()))
    return [list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)) for t in turns]


def parted(one: Sequence[list[int]], two: Sequence[list[int]]) -> list[int]:
    """For every pair of texts that differ, the position of the first difference.

    >>> parted([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    [1]
    """
    return [agreeing(a, b) for a, b in zip(one, two, strict=True) if a != b]


def agreeing(one: list[int], two: list[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def own_pair(model: Path, drafter: str, beam: str) -> tuple[OwnWriter, OwnWriter]:
    """redrafter's own engine in place of SGLang, for smoke runs."""
    target = load_target(model, dtype="fp32", device="cpu")
    own = RecurrentDrafter.load(drafter.removesuffix("+ngram"), target)
    return OwnWriter(Engine(target, NoDrafter())), OwnWriter(Engine(target, own, shape=Shape.of(beam)))


def budget(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions, "--device", "cpu"]
    words += ["--engines", tiny.new_folder(), "--shape", SMOKE, "--budget", 200_000, "--beam", "2x2:3"]
    return [*words, "--parts", "small", "wide", "--levels", 1, 2, "--tokens", 6, "--requests", 2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "sglang_gpu.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["unpack", "small", "wide"])
    parser.add_argument("--engines", type=Path, default=Path.home() / "engines", help="folder of the parcels")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto", help="the small target's drafter")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened target")
    parser.add_argument("--budget", type=budget, default="100M", help="parameters of the widened drafter")
    parser.add_argument("--beam", default="16x5:63", help="shape of the largest tree")
    parser.add_argument("--settings", default="{}", help="settings of the plug-in (default: tried until one works)")
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), help="concurrent requests")
    parser.add_argument("--requests", type=int, default=8, help="requests of a level, at least")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--patience", type=float, default=200, help="seconds to wait for an engine's answer")
    parser.add_argument("--seconds", type=float, default=500, help="begin no level after this time")
    args = parse(parser, argv, smoke)
    args.engines = args.engines.expanduser()
    args.engines.mkdir(parents=True, exist_ok=True)
    if args.parts == ["parcels"]:
        parcels.build(args.engines)
        return
    check_new(args.save, args.overwrite)
    if "unpack" in args.parts:
        parcels.unpack(args.engines)
    bench = EnginesBenchmark(args)
    if "small" in args.parts:
        bench.small()
    if "wide" in args.parts:
        bench.wide()


if __name__ == "__main__":
    main()
