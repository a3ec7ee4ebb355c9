"""Speculative against plain decoding on a GPU, with a widened model.

    python benchmarks/gpu.py --shape vicuna-7b

Both contenders are compiled and recorded as CUDA graphs. They take turns, prompt by prompt; figures are medians over
the rounds. Parts: `speed` (wall-clock time and tokens/step), `tasks` (the same at T = 1, for summaries, and for a
paragraph to be repeated), `profile` (the time of each stage of a step, from a profiler trace), `memory`, `start` (from
a loaded model to the first token and to the first speculative step, each in a new process with empty and with filled
compiler caches; `--parts start` runs nothing else), `equality` (texts at T = 1 with a seed), `long` (long prompts),
`packing` (beams unpacked and packed into trees), `batch` (beam widths × rows). Results are written after each part.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/gpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import HERE, arguments, first_turns, parse
from benchmarks.gpu_compare import compare, once, synchronize
from benchmarks.gpu_start import time_starts
from benchmarks.gpu_trace import ATTENTION, busy_ms, by_name, split_steps, stage_times
from benchmarks.smoke import TinyFiles
from benchmarks.step_times import DummyDrafter, TimingBudget, context_for, time_steps
from benchmarks.widen.load import SMOKE, label, load_wide
from redrafter.config import Shape
from redrafter.drafters import WithNgrams
from redrafter.engine import Engine
from redrafter.engine.ties import explain
from redrafter.errors import OutOfMemory
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.runtime.batch import Batch

PARTS = ("speed", "tasks", "profile", "memory", "start", "equality", "long", "packing", "batch")
CORRECT = "Repeat the first paragraph with its spelling corrected."
CONTEXTS = (512, 2048, 4096, 8000)
WIDTHS, BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 10, 20, 40, 80)
PACKED_ROWS = (1, 4, 16, 40)


class GpuBenchmark:
    """The contenders, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target, self.drafter, _ = load_wide(
            args.shape, args.device, drafter_budget=args.budget, model=args.model, drafter=args.drafter
        )
        mixed = WithNgrams(self.drafter) if args.ngrams else self.drafter
        self.speculative = Engine(self.target, mixed, shape=Shape.of(args.beam), runtime=args.runtime)
        self.plain = self.speculative.plain()
        self.prompts = first_turns(args.questions, args.prompts)
        self.rows: list[dict[str, Any]] = []
        self.headline: dict[str, float] = {}
        self.words: list[str] = []

    @property
    def contenders(self) -> dict[str, Engine]:
        return {"plain": self.plain, "speculative": self.speculative}

    def prepare(self) -> None:
        """Compile and record the steps that the first parts need."""
        for name, engine in self.contenders.items():
            if self.args.only_start and name == "plain":
                continue
            before, began = torch.cuda.memory_allocated(), time.perf_counter()
            found = once(engine, self.prompts[0], 16)
            self.rows.append(
                {
                    "part": "prepare",
                    "contender": name,
                    "first_token_seconds": round(found["prompt"], 2),
                    "first_step_seconds": round(found["first_step"], 2),
                    "seconds": round(time.perf_counter() - began, 2),
                    "stages": {stage: round(seconds, 2) for stage, seconds in engine.target.start_times.items()},
                    "recorded": engine.recorded,
                    "gigabytes": (torch.cuda.memory_allocated() - before) / 1e9,
                }
            )
            print(self.rows[-1], flush=True)

    def save(self) -> None:
        save(self.args, self.headline, self.rows)


def save(args: argparse.Namespace, headline: dict[str, float], rows: list[dict[str, Any]]) -> None:
    labelled = [{"target": label(args.shape), "beam": args.beam} | row for row in rows]
    write_results(args.save, headline, labelled)


def speed(bench: GpuBenchmark) -> None:
    row = compare(bench.contenders, bench.prompts, bench.args.tokens, bench.args.rounds)
    row["efficiency"] = row["speedup"] / row["tokens_per_step"]
    bench.rows.append({"part": "speed", "temperature": 0.0} | row)
    for key in ("speedup", "speedup_with_prompt", "tokens_per_step", "efficiency", "plain_ms", "step_ms"):
        bench.headline[key] = round(row[key], 4)


def tasks(bench: GpuBenchmark) -> None:
    """Compare at T = 1, and where answers repeat their prompts: summaries, and a paragraph to be corrected."""
    articles = [q.text.removeprefix("Summarize: ") for q in read_questions(bench.args.articles, bench.args.long_texts)]
    asked = {
        "t1": bench.prompts,
        "summary": [[{"role": "user", "content": f"Summarize: {a}"}] for a in articles],
        "copying": [[{"role": "user", "content": f"{opened(a)}\n\n{CORRECT}"}] for a in articles],
    }
    for name, prompts in asked.items():
        options = {"temperature": 1.0} if name == "t1" else {}
        rounds = bench.args.rounds if name == "t1" else max(1, bench.args.rounds // 2)  # there are more articles
        row = compare(bench.contenders, prompts, bench.args.tokens, rounds, **options)
        bench.rows.append({"part": "tasks", "task": name} | row)
        bench.headline[f"{name}_speedup"] = round(row["speedup"], 4)
        bench.headline[f"{name}_tokens_per_step"] = round(row["tokens_per_step"], 4)
        print(bench.rows[-1], flush=True)


def opened(article: str) -> str:
    """The article with its first 60 words or more, to the end of their sentence, as a paragraph of its own.

    >>> opened("One two. " * 40).split("\\n\\n")[0].count("One")
    30
    """
    words = article.split()
    end = next((i for i, word in enumerate(words, 1) if i >= 60 and word.endswith(".")), len(words))
    return " ".join(words[:end]) + "\n\n" + " ".join(words[end:])


def trace(bench: GpuBenchmark) -> None:
    """Profile single steps: kernels, the time of each stage, and idle time."""
    question = bench.prompts[0]
    for name, engine in bench.contenders.items():
        free = [once(engine, question, 64, most=256, ignore_eos=True) for _ in range(3)]
        step_ms = statistics.median(1e3 * r["decode"] / r["steps"] for r in free)
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            once(engine, question, 48, most=256, ignore_eos=True)
        steps = [s for s in split_steps(prof) if any(k[0].startswith(ATTENTION) for k in s)][2:-2]
        stages = [stage_times(s) for s in steps]
        row: dict[str, Any] = {"part": "profile", "contender": name, "step_ms": step_ms, "steps_traced": len(stages)}
        row["kernels"] = statistics.median(len(s) for s in steps)
        for stage in stages[0]:
            row[f"{stage}_ms"] = statistics.median(s[stage] for s in stages)
        row["busy_ms"] = statistics.median(map(busy_ms, steps))
        row["idle_fraction"] = max(0.0, 1 - row["busy_ms"] / step_ms)
        bench.rows += [row, {"part": "kernels", "contender": name, "microseconds_and_count": by_name(steps)}]
        if name == "speculative":
            bench.headline["draft_ms_w16"] = round(row["draft_ms"], 4)
            bench.headline["idle_fraction"] = round(row["idle_fraction"], 4)


def memory(bench: GpuBenchmark) -> None:
    """Measure the memory that the drafter adds to plain decoding."""
    weights = sum(p.numel() * p.element_size() for p in bench.target.model.parameters())
    net = sum(p.numel() * p.element_size() for p in bench.drafter.net.parameters())
    own = bench.drafter.vocabulary
    tied = bench.target.output_embedding.weight
    copied = 0 if own.data_ptr() == tied.data_ptr() else own.numel() * own.element_size()
    if bench.drafter.table is not None:
        copied += bench.drafter.table.numel() * bench.drafter.table.element_size()
    made = {r["contender"]: r["gigabytes"] for r in bench.rows if r["part"] == "prepare"}
    bench.rows.append(
        {
            "part": "memory",
            "target_gigabytes": weights / 1e9,
            "drafter_gigabytes": (net + copied) / 1e9,
            "plain_program_gigabytes": made.get("plain"),
            "speculative_program_gigabytes": made.get("speculative"),
            "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        }
    )


def start(bench: GpuBenchmark) -> None:
    rows, headline = time_starts(__file__, bench.words)
    bench.rows += rows
    bench.headline |= headline


def equality(bench: GpuBenchmark) -> None:
    """Compare texts at T = 1 with a seed, ten at a time, and explain every difference."""
    prompts = first_turns(bench.args.questions, bench.args.texts)
    engines = {k: Engine(e.target, e.drafter, shape=e.shape, runtime="graphs") for k, e in bench.contenders.items()}
    requests = bench.plain.requests(prompts, max_new_tokens=bench.args.tokens, seed=7, temperature=1.0, ignore_eos=True)
    batches = [requests[i : i + 10] for i in range(0, len(requests), 10)]
    done = {name: [c for b in batches for c in engine.complete(b)] for name, engine in engines.items()}
    pairs = list(zip(requests, done["plain"], done["speculative"], strict=True))
    found = [(i, explain(bench.target, r, a.tokens, b.tokens)) for i, (r, a, b) in enumerate(pairs)]
    differences = [{"text": i, "token": d.index, "gap": d.gap, "tie": d.is_tie} for i, d in found if d is not None]
    steps = sum(c.stats.steps for c in done["speculative"])
    bench.rows.append(
        {
            "part": "equality",
            "temperature": 1.0,
            "texts": len(pairs),
            "tokens": sum(len(a.tokens) for _, a, _ in pairs),
            "equal": len(pairs) - len(differences),
            "ties": sum(p["tie"] for p in differences),
            "tokens_per_step": sum(len(c.tokens) - 1 for c in done["speculative"]) / steps,
            "differences": differences,
        }
    )
    bench.headline["t1_equal"] = len(pairs) - len(differences)
    bench.headline["t1_ties"] = sum(p["tie"] for p in differences)


def long(bench: GpuBenchmark) -> None:
    """Compare at several prompt lengths: other questions stand before the one to answer."""
    questions = [q.text for q in read_questions(bench.args.questions)]
    for length in bench.args.contexts:
        prompts = [padded(bench.plain, questions, i, length) for i in range(bench.args.long_prompts)]
        for prompt in prompts[:1]:
            for engine in bench.contenders.values():
                once(engine, prompt, 8, most=bench.target.max_positions)
        row = compare(
            bench.contenders,
            prompts,
            min(64, bench.args.tokens),
            min(3, bench.args.rounds),
            most=bench.target.max_positions,
            ignore_eos=True,
        )
        bench.rows.append({"part": "long", "context": length} | row)
        print(bench.rows[-1], flush=True)


def padded(engine: Engine, questions: list[str], which: int, length: int) -> list[int]:
    """Return question `which`, after as many others as fit into `length` tokens."""
    asked = engine.encode([{"role": "user", "content": questions[which]}])
    others = "\n\n".join(questions[which + 1 :] + questions[:which])
    before = engine.encode("\n\n".join([others] * 4))
    return before[: length - len(asked)] + asked


def batch(bench: GpuBenchmark) -> None:
    """Measure tokens/s by beam width and rows; without torch.compile, so that steps are recorded quickly."""
    prompts = first_turns(bench.args.questions, max(bench.args.rows))
    for rows in bench.args.rows:
        for width in (0, *bench.args.widths):
            shape = Shape(width=width, length=5, nodes=min(63, 5 * width)) if width else None
            base = bench.speculative if width else bench.plain
            engine = Engine(bench.target, base.drafter, shape=shape, runtime="graphs")
            requests = engine.requests(
                prompts[:rows], max_new_tokens=min(48, bench.args.tokens), seed=1, ignore_eos=True
            )
            row: dict[str, Any] = {"part": "batch", "rows": rows, "width": width, "beam": engine.shape.label}
            try:
                row |= timed(engine, requests)
            except OutOfMemory as error:
                row["refused"] = str(error)
            bench.rows.append(row)
            bench.save()
            del engine
            torch.cuda.empty_cache()


def timed(engine: Engine, requests: list[Any]) -> dict[str, float]:
    """Time the second of two runs; the first records the CUDA graph."""
    rate = 0.0
    for _ in range(2):
        tokens, steps, began = 0, 0, 0.0
        for parts in engine.run(requests):
            if not began:
                synchronize()
                began = time.perf_counter()
            else:
                steps += 1
                tokens += sum(len(p.tokens) for p in parts)
        rate = tokens / (time.perf_counter() - began)
    rows = len(requests)
    return {
        "tokens_per_second": rate,
        "tokens_per_second_and_row": rate / rows,
        "tokens_per_step": tokens / steps / rows,
    }


def packing(bench: GpuBenchmark) -> None:
    """Time the verification of a beam's tokens unpacked, and of the nodes of its packed tree (the papers' Figure 6)."""
    measured = json.loads((HERE / "results" / "packing.json").read_text())["rows"]
    prompts = [bench.plain.encode(m) for m in first_turns(bench.args.questions, max(bench.args.packed_rows))]
    drafter, budget = DummyDrafter(bench.drafter), TimingBudget(turns=bench.args.rounds, steps=10, seconds=60)
    for rows in bench.args.packed_rows:
        for before, after in ((int(m["before"]), round(m["after_mean"])) for m in measured):
            shapes = [drafter.shape(n) for n in (before, after)]
            context = context_for(shapes, budget.steps, max(map(len, prompts)))
            batch = Batch(bench.target, drafter, rows=rows, context=context, shapes=shapes, runtime="graphs")
            _, times = time_steps(batch, rows, shapes, prompts, budget)
            row = {"part": "packing", "rows": rows, "tokens": before, "packed": after}
            bench.rows.append(row | {"unpacked_ms": times[0], "packed_ms": times[1]})
            bench.save()
            del batch
            torch.cuda.empty_cache()


RUN: dict[str, Callable[[GpuBenchmark], None]] = {
    "speed": speed,
    "tasks": tasks,
    "profile": trace,
    "memory": memory,
    "start": start,
    "equality": equality,
    "long": long,
    "packing": packing,
    "batch": batch,
}


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--device", "cpu", "--questions", tiny.questions]
    words += ["--shape", SMOKE, "--budget", 200_000, "--beam", "2x3:4", "--runtime", "eager"]
    words += ["--prompts", 1, "--tokens", 6, "--rounds", 1, "--texts", 1, "--long-prompts", 1, "--contexts", 64]
    words += ["--articles", tiny.questions, "--long-texts", 1]
    words += ["--rows", 2, "--widths", 2, "--packed-rows", 1]
    return [*words, "--parts", "speed", "tasks", "memory", "equality", "long", "packing", "batch"]  # others need a GPU


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "gpu_7b.json")
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened target (default vicuna-7b)")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", type=Path, help="folder of the small drafter (default: that of the package)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=budget, default="80M", help="parameters read per draft step (default 80M)")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--no-ngrams", dest="ngrams", action="store_false", help="the recurrent drafter alone")
    parser.add_argument("--runtime", default="compiled")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=50, help="number of texts in the part `equality`")
    parser.add_argument("--long-prompts", type=int, default=4, help="number of prompts in the part `long`")
    parser.add_argument("--articles", type=Path, default=HERE / "data" / "cnn_dm.jsonl", help="for the part `tasks`")
    parser.add_argument("--long-texts", type=int, default=20, help="number of articles in the part `tasks`")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="prompt lengths in the part `long`")
    parser.add_argument("--rows", type=int, nargs="+", default=BATCHES, help="rows in the part `batch`")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="beam widths in the part `batch`")
    parser.add_argument("--packed-rows", type=int, nargs="+", default=PACKED_ROWS, help="rows in the part `packing`")
    parser.add_argument("--parts", nargs="+", default=list(PARTS[:-2]), choices=PARTS)
    parser.add_argument("--only-start", action="store_true", help="only time the first tokens: what `start` runs")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    words = list(sys.argv[1:] if argv is None else argv)
    if args.parts == ["start"] and not args.only_start:  # nothing else needs a model in this process
        rows, headline = time_starts(__file__, words)
        return save(args, headline, rows)
    bench = GpuBenchmark(args)
    bench.words = words
    bench.prepare()
    bench.save()
    for part in [] if args.only_start else args.parts:
        RUN[part](bench)
        print(part, {k: v for k, v in bench.rows[-1].items() if k != "differences"}, flush=True)
        bench.save()


def budget(text: str) -> str | int:
    return int(text) if text.isdigit() else text


if __name__ == "__main__":
    main()
