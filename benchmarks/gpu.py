"""Speculative against plain decoding on a GPU, with a small model's behaviour at a large model's cost.

    python benchmarks/gpu.py --shape vicuna-7b

Both contenders are compiled and recorded as CUDA graphs; they take turns, prompt by prompt, and a figure is the
median over the rounds. Parts: `speed` (wall clock and tokens/step), `profile` (where a step's time goes, from a
profiler's trace), `memory`, `equality` (texts at T = 1 with a seed), `long` (long prompts), `packing` (beams as
they are and as trees), `batch` (beam widths × rows). Results are written after each part.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from redrafter.runtime.pool import Pool
from torch.profiler import ProfilerActivity, profile

from common import HERE, arguments, first_turns
from redrafter.config import Shape
from redrafter.engine import Engine
from redrafter.engine.ties import explain
from redrafter.errors import OutOfMemory
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.tuning.step_cost import DummyDrafter, TimingBudget, context_for, time_steps
from wide import load_wide

PARTS = ("speed", "profile", "memory", "equality", "long", "packing", "batch")
CONTEXTS = (512, 2048, 4096, 8000)
WIDTHS, BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 10, 20, 40, 80)
PACKED_ROWS = (1, 4, 16, 40)
ATTENTION = "_tree_attention"
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "cublas")


class Bench:
    """The contenders, and what was found about them so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target, self.drafter, self.label = load_wide(args.shape, drafter_budget=args.drafter, model=args.model)
        self.speculative = Engine(self.target, self.drafter, shape=Shape.of(args.beam), runtime=args.runtime)
        self.plain = self.speculative.plain()
        self.prompts = first_turns(args.questions, args.prompts)
        self.rows: list[dict[str, Any]] = []
        self.headline: dict[str, float] = {}

    @property
    def contenders(self) -> dict[str, Engine]:
        return {"plain": self.plain, "speculative": self.speculative}

    def prepare(self) -> None:
        """Compile and record everything the first parts need."""
        for name, engine in self.contenders.items():
            before, began = torch.cuda.memory_allocated(), time.perf_counter()
            once(engine, self.prompts[0], 16)
            assert engine.programs is not None
            self.rows.append(
                {
                    "part": "prepare",
                    "contender": name,
                    "seconds": round(time.perf_counter() - began, 1),
                    "recorded": not engine.programs.hopeless,
                    "gigabytes": (torch.cuda.memory_allocated() - before) / 1e9,
                }
            )
            print(self.rows[-1], flush=True)

    def save(self) -> None:
        labelled = [{"target": self.label, "beam": self.args.beam} | row for row in self.rows]
        write_results(self.args.save, self.headline, labelled)


def once(engine: Engine, prompt: Any, tokens: int, most: int | None = None, **options: Any) -> dict[str, float]:
    """One answer of at most `tokens` tokens: how long its prompt took, and its steps. `most` fixes the cache's size."""
    requests = engine.requests([prompt], max_new_tokens=most or tokens, seed=1, **options)
    torch.cuda.synchronize()
    began = time.perf_counter()
    first, steps, new = 0.0, 0, 0
    for parts in engine.run(requests):
        if not first:
            first = time.perf_counter()
        else:
            steps += 1
            new += len(parts[0].tokens)
        if new >= tokens - 1:
            break
    ended = time.perf_counter()
    torch.cuda.synchronize()
    return {"prompt": first - began, "decode": ended - first, "steps": steps, "tokens": new}


def total(rows: list[dict[str, float]], key: str) -> float:
    return sum(r[key] for r in rows)


def compare(bench: Bench, prompts: list[Any], tokens: int, rounds: int, **options: Any) -> dict[str, Any]:
    """Contenders in turn over all prompts, several times; ratios are medians over the rounds."""
    found: list[dict[str, list[dict[str, float]]]] = []
    for _ in range(rounds):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in bench.contenders}
        for prompt in prompts:
            for name, engine in bench.contenders.items():
                runs[name].append(once(engine, prompt, tokens, **options))
        found.append(runs)

    def rate(runs: list[dict[str, float]], *keys: str) -> float:
        return total(runs, "tokens") / sum(total(runs, k) for k in keys)

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    last = found[-1]["speculative"]
    return {
        "tokens_per_step": total(last, "tokens") / total(last, "steps"),
        "speedup": median(rate(f["speculative"], "decode") / rate(f["plain"], "decode") for f in found),
        "speedup_with_prompt": median(
            rate(f["speculative"], "prompt", "decode") / rate(f["plain"], "prompt", "decode") for f in found
        ),
        "plain_ms": median(1e3 * total(f["plain"], "decode") / total(f["plain"], "steps") for f in found),
        "step_ms": median(1e3 * total(f["speculative"], "decode") / total(f["speculative"], "steps") for f in found),
        "prompt_ms": median(1e3 * total(f["plain"], "prompt") / len(prompts) for f in found),
        "tokens": total(last, "tokens"),
        "rounds": rounds,
    }


def speed(bench: Bench) -> None:
    row = compare(bench, bench.prompts, bench.args.tokens, bench.args.rounds)
    row["efficiency"] = row["speedup"] / row["tokens_per_step"]
    bench.rows.append({"part": "speed", "temperature": 0.0} | row)
    for key in ("speedup", "speedup_with_prompt", "tokens_per_step", "efficiency", "plain_ms"):
        bench.headline[key] = round(row[key], 4)


def trace(bench: Bench) -> None:
    """One step's kernels in order; stages are told apart by kernels that only one of them has."""
    question = bench.prompts[0]
    for name, engine in bench.contenders.items():
        free = [once(engine, question, 64, most=256, ignore_eos=True) for _ in range(3)]
        step_ms = statistics.median(1e3 * r["decode"] / r["steps"] for r in free)
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            once(engine, question, 24, most=256, ignore_eos=True)
        steps = [s for s in split_steps(prof) if any(k[0].startswith(ATTENTION) for k in s)][2:-2]
        stages = [staged(s) for s in steps]
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


def by_name(steps: list[list["Kernel"]]) -> dict[str, tuple[float, float]]:
    """What a step spends on kernels of a name, the most costly first, and how many there are."""
    spent: dict[str, list[float]] = {}
    for kernel in (k for s in steps for k in s):
        spent.setdefault(kernel[0][:80], []).append(kernel[2])
    most = sorted(spent.items(), key=lambda x: -sum(x[1]))[:30]
    return {name: (round(sum(v) / len(steps), 2), round(len(v) / len(steps), 1)) for name, v in most}


Kernel = tuple[str, float, float]
"""Name, start and duration in microseconds."""


def split_steps(prof: profile) -> list[list[Kernel]]:
    """A step ends with the copy of its result to the host."""
    events = sorted(
        (
            (e.name, float(e.time_range.start), float(e.time_range.elapsed_us()))
            for e in prof.events() or []
            if e.device_type == torch.autograd.DeviceType.CUDA
        ),
        key=lambda k: k[1],
    )
    steps: list[list[Kernel]] = [[]]
    for event in events:
        if "DtoH" in event[0]:
            steps.append([])
        else:
            steps[-1].append(event)
    return steps


def busy_ms(kernels: list[Kernel]) -> float:
    """Milliseconds in which any of these runs. A kernel may begin, and wait, before the last one has ended."""
    busy, end = 0.0, 0.0
    for _, start, took in kernels:
        busy += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
    return busy / 1e3


def staged(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds from one stage's first kernel to the next one's."""
    places = {
        part: [i for i, k in enumerate(kernels) if k[0].startswith(part)] for part in ("_choose", ATTENTION, "_commit")
    }
    is_product = [any(p in k[0].lower() for p in PRODUCTS) for k in kernels]
    drafted = places["_choose"][-1] + 1 if places["_choose"] else 0
    verify = next((i for i in range(drafted, len(kernels)) if is_product[i]), drafted) if drafted else 0
    after = places[ATTENTION][-1] + 1
    commit = places["_commit"][-1]
    head = max(range(after, commit), key=lambda i: kernels[i][2])  # the vocabulary: by far the longest there
    cuts = {"draft": 0, "pack": drafted, "verify": verify, "accept": head + 1, "commit": commit, "follow": commit + 1}
    times = [kernels[min(c, len(kernels) - 1)][1] for c in cuts.values()]
    times.append(kernels[-1][1] + kernels[-1][2])
    return {name: (b - a) / 1e3 for name, a, b in zip(cuts, times, times[1:], strict=False)}


def memory(bench: Bench) -> None:
    """What decoding with a drafter adds to the plain one."""
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


def equality(bench: Bench) -> None:
    """Texts at T = 1 with a seed, ten at a time; every difference with how close the two tokens were."""
    prompts = first_turns(bench.args.questions, bench.args.texts)
    engines = {k: Engine(e.target, e.drafter, shape=e.shape, runtime="graphs") for k, e in bench.contenders.items()}
    requests = bench.plain.requests(prompts, max_new_tokens=128, seed=7, temperature=1.0, ignore_eos=True)
    batches = [requests[i : i + 10] for i in range(0, len(requests), 10)]
    done = {name: [c for b in batches for c in engine.complete(b)] for name, engine in engines.items()}
    pairs = list(zip(requests, done["plain"], done["speculative"], strict=True))
    found = [(i, explain(bench.target, r, a.tokens, b.tokens)) for i, (r, a, b) in enumerate(pairs)]
    parted = [{"text": i, "token": d.index, "gap": d.gap, "tie": d.is_tie} for i, d in found if d is not None]
    steps = sum(c.stats.steps for c in done["speculative"])
    bench.rows.append(
        {
            "part": "equality",
            "temperature": 1.0,
            "texts": len(pairs),
            "tokens": sum(len(a.tokens) for _, a, _ in pairs),
            "equal": len(pairs) - len(parted),
            "ties": sum(p["tie"] for p in parted),
            "tokens_per_step": sum(len(c.tokens) - 1 for c in done["speculative"]) / steps,
            "differences": parted,
        }
    )
    bench.headline["t1_equal"] = len(pairs) - len(parted)
    bench.headline["t1_ties"] = sum(p["tie"] for p in parted)


def long(bench: Bench) -> None:
    """Other questions before the one to answer, up to a length."""
    questions = [q.text for q in read_questions(bench.args.questions)]
    for length in CONTEXTS:
        prompts = [padded(bench.plain, questions, i, length) for i in range(bench.args.long_prompts)]
        for prompt in prompts[:1]:
            for engine in bench.contenders.values():
                once(engine, prompt, 8, most=bench.target.max_positions)
        row = compare(bench, prompts, 64, 3, most=bench.target.max_positions, ignore_eos=True)
        bench.rows.append({"part": "long", "context": length} | row)
        print(bench.rows[-1], flush=True)


def padded(engine: Engine, questions: list[str], which: int, length: int) -> list[int]:
    """Question `which`, after as many others as fit into `length` tokens."""
    asked = engine.encode([{"role": "user", "content": questions[which]}])
    others = "\n\n".join(questions[which + 1 :] + questions[:which])
    before = engine.encode("\n\n".join([others] * 4))
    return before[: length - len(asked)] + asked


def batch(bench: Bench) -> None:
    """tokens/s by beam width and rows, all rows answering; without torch.compile around the beam, to record quickly."""
    prompts = first_turns(bench.args.questions, max(bench.args.rows))
    for rows in bench.args.rows:
        for width in (0, *WIDTHS):
            shape = Shape(width=width, length=5, nodes=min(63, 5 * width)) if width else None
            base = bench.speculative if width else bench.plain
            engine = Engine(bench.target, base.drafter, shape=shape, runtime="graphs")
            requests = engine.requests(prompts[:rows], max_new_tokens=48, seed=1, ignore_eos=True)
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
    """The second of two runs: the first records."""
    rate = 0.0
    for _ in range(2):
        tokens, steps, began = 0, 0, 0.0
        for parts in engine.run(requests):
            if not began:
                torch.cuda.synchronize()
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


def packing(bench: Bench) -> None:
    """The papers' Figure 6: verifying a beam's tokens as they are, and as many nodes as its tree has on average."""
    measured = json.loads((HERE / "results" / "packing.json").read_text())["rows"]
    prompts = [bench.plain.encode(m) for m in first_turns(bench.args.questions, max(PACKED_ROWS))]
    drafter, budget = DummyDrafter(bench.drafter), TimingBudget(turns=5, steps=10, seconds=60)
    for rows in PACKED_ROWS:
        for before, after in ((int(m["before"]), round(m["after_mean"])) for m in measured):
            shapes = [drafter.shape(n) for n in (before, after)]
            context = context_for(shapes, budget.steps, max(map(len, prompts)))
            batch = Pool(bench.target, drafter, rows=rows, context=context, kept=0, shapes=shapes, runtime="graphs")
            _, times = time_steps(batch, rows, shapes, prompts, budget)
            row = {"part": "packing", "rows": rows, "tokens": before, "packed": after}
            bench.rows.append(row | {"unpacked_ms": times[0], "packed_ms": times[1]})
            bench.save()
            del batch
            torch.cuda.empty_cache()


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__.splitlines()[0], "gpu_7b.json")
    made.add_argument("--shape", default="vicuna-7b", help="whose cost (default vicuna-7b)")
    made.add_argument("--model", help="the small target, converted already (default: the embedded one)")
    made.add_argument("--drafter", default="100M", help="parameters read per draft step: 100M, 120M or 430M")
    made.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    made.add_argument("--runtime", default="compiled")
    made.add_argument("--prompts", type=int, default=10)
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--texts", type=int, default=50)
    made.add_argument("--long-prompts", type=int, default=4)
    made.add_argument("--rows", type=int, nargs="+", default=BATCHES, help="at once, in the part `batch`")
    made.add_argument("--parts", nargs="+", default=list(PARTS[:-2]), choices=PARTS)
    return made


RUN = {
    "speed": speed,
    "profile": trace,
    "memory": memory,
    "equality": equality,
    "long": long,
    "packing": packing,
    "batch": batch,
}


def main() -> None:
    args = parser().parse_args()
    check_new(args.save, args.overwrite)
    bench = Bench(args)
    bench.prepare()
    for part in args.parts:
        RUN[part](bench)
        print(part, {k: v for k, v in bench.rows[-1].items() if k != "differences"}, flush=True)
        bench.save()


if __name__ == "__main__":
    main()
