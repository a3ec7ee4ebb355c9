"""Time verification alone on a GPU: from the logits of target and drafter to the new tokens.

    python benchmarks/verify_kernel.py

"Speed" verifies bf16 logits that are not in the GPU's caches: each turn verifies several copies, at least eight and
more than the L2 cache holds, and its time is divided by their number. A larger array is read before each turn.
Contenders take turns, and figures are medians over the rounds. `eager` runs the loop over the copies in Python; `graph`
records it as one CUDA graph, for contenders that do not synchronise with the host. transformers' function synchronises
and takes one row; for more rows it is rewritten in batched torch without synchronisation, which can only make it
faster. Logits are already scaled by the temperature and filtered, for all contenders.

Filters are timed separately: the thresholds of top-k 50 with top-p 0.9, by the kernel and by sorting.

"Parity" compares the kernel with its oracle, with the same random numbers and inputs from a new seed. Results are saved
after each step, so that an interrupted run keeps them.

With `--device cpu` the kernels run in Triton's interpreter, at small sizes only, and the results mean nothing.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/verify_kernel.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import itertools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter import kernels
from redrafter.bench.verification import (
    Case,
    Verified,
    fused,
    paper_exact,
    sigmoid_lossy,
    transformers_batched,
    transformers_own,
)
from redrafter.config import SamplingParams
from redrafter.core import sampling
from redrafter.core.noise import SEEDED, gumbel
from redrafter.errors import RedrafterError
from redrafter.kernels.verify import seeded
from redrafter.results import check_new, write_results

BATCHES = (1, 16, 64)
VOCABS = (257, 32000, 49152, 128256, 151936)
GRID = ((1, 1), (1, 5), (16, 5), (16, 20), (64, 5), (64, 20))
COLD_BYTES = 256 * 2**20
"""Bytes of logits verified per turn, at least: several times the size of a GPU's L2 cache."""
COPIES = 8
"""Calls per turn, at least: they share the launch time of a CUDA graph, some microseconds."""


def make_case(
    batch: int,
    gamma: int,
    vocab: int,
    device: str,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    apart: float = 0.5,
    heat: float = 1.0,
) -> Case:
    """Make a peaked target distribution and a drafter that is often right, with tokens sampled from the drafter."""
    torch.manual_seed(seed)
    target = (torch.randn(batch, gamma + 1, vocab, device=device) * 3).to(dtype)
    draft = (target[:, :gamma] + torch.randn(batch, gamma, vocab, device=device) * apart).to(dtype)
    race = torch.empty(batch, gamma, vocab, device=device).exponential_()
    tokens = ((draft.float() / heat).softmax(-1) / race).argmax(
        -1
    )  # as torch.multinomial, which takes no more than 2^24
    rows = torch.arange(batch, device=device)
    full = torch.full((batch,), gamma, device=device)
    return Case(target, draft, tokens, full, rows + seed * 1000, rows, torch.full((batch,), heat, device=device), heat)


def transformers_as_called(case: Case) -> Verified:
    """Run transformers' function with the conversion to fp32 that `generate` does before it."""
    return transformers_own(replace(case, target=case.target.float(), draft=case.draft.float()))


Contender = Callable[[Case], Verified]
SYNCHRONISES: dict[str, Contender] = {"transformers": transformers_own, "transformers_fp32": transformers_as_called}
NEVER_SYNCHRONISES: dict[str, Contender] = {
    "transformers_batched": transformers_batched,
    "paper_exact": paper_exact,
    "sigmoid_lossy": sigmoid_lossy,
    "fused": fused,
}


@cache
def beyond_caches(device: str) -> Tensor:
    return torch.zeros(2**27, device=device)


def clock(action: Callable[[], Any], device: str) -> float:
    """Time an action in seconds, with CUDA events on a GPU."""
    if device == "cpu":
        began = time.perf_counter()
        action()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    beyond_caches(device).sum()
    torch.cuda.synchronize()
    start.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def record(action: Callable[[], Any]) -> Callable[[], None]:
    """Record an action as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def read_bandwidth(device: str) -> float:
    """Measure the read bandwidth in bytes/s: the faster of two reductions over an array larger than the caches."""
    count = 2**29 if device != "cpu" else 2**22
    data = torch.zeros(count, device=device)
    best = 0.0
    for reduce in (torch.sum, torch.amax):
        reduce(data)
        seconds = [clock(partial(reduce, data), device) for _ in range(20)]
        best = max(best, data.nbytes / statistics.median(seconds))
    return best


def fused_bytes(case: Case) -> int:
    """Count the bytes of logits that verification needs.

    These are all drafted rows of p and q, then a row of both where a token was rejected, or the last row of p. Rows
    after a rejection count in full, although the kernel may skip them.
    """
    _, accepted = fused(case)
    gamma, vocab = case.tokens.shape[1], case.target.shape[-1]
    second = torch.where(accepted < gamma, 2, 1).sum().item()
    return case.target.element_size() * vocab * (2 * gamma * len(accepted) + int(second))


def by_both(action: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernel says, and the oracle."""
    with kernels.force("triton"):
        fast = action()
    with kernels.force("naive"):
        return fast, action()


def agreement(case: Case) -> Tensor:
    """Return per row (B,) whether kernel and oracle agree. They may differ where a number is near a threshold."""
    (mine, n), (want, m) = by_both(lambda: fused(case))
    real = torch.arange(want.shape[1], device=want.device) <= m[:, None]
    same: Tensor = (n == m) & ((mine == want) | ~real).all(1)
    return same


def seeded_agreement(batch: int, nodes: int, vocab: int, args: argparse.Namespace, seed: int) -> Tensor:
    """Return per node (B, N) of a random tree whether kernel and oracle choose the same token."""
    torch.manual_seed(seed)
    logits = (torch.randn(batch, nodes, vocab, device=args.device) * 3).bfloat16()
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    depths = torch.zeros(batch, nodes, dtype=torch.long)
    for i in range(1, nodes):
        parents[:, i] = torch.randint(max(0, i - 4), i, (batch,))
        depths[:, i] = depths.gather(1, parents[:, i : i + 1])[:, 0] + 1
    length = int(depths.max())
    depths = depths.to(args.device)
    rows = torch.arange(batch, device=args.device)
    heat = torch.tensor([1.0, 0.0, 0.6, 1.4], device=args.device).repeat(-(-batch // 4))[:batch]
    ahead = rows[:, None] * 7 + 1 + torch.arange(length + 1, device=args.device)
    noise = gumbel(rows + seed, ahead, vocab, stream=SEEDED, dtype=torch.float32)
    mine, want = by_both(lambda: seeded(logits, depths, heat, rows + seed, rows * 7, None, SEEDED, lambda: noise))
    equal: Tensor = mine == want
    return equal


def parity(args: argparse.Namespace) -> None:
    """Compare the kernel with the oracle over the whole grid, with inputs from a new seed, and write the results."""
    path = args.save.with_name("verify_parity.json")
    check_new(path, args.overwrite)
    rows: list[dict[str, Any]] = []
    dtypes = itertools.cycle([torch.bfloat16, torch.float32, torch.float16])
    apart, heat = itertools.cycle([0.5, 0.1, 1.5]), itertools.cycle([1.0, 0.7, 1.3, 1.0])
    for vocab in args.vocabs:
        for batch, gamma in args.grid:
            kind = (next(dtypes), next(apart), next(heat))
            case = make_case(batch, gamma, vocab, args.device, args.seed + len(rows), *kind)
            case.counts.copy_(torch.randint(max(0, gamma - 2), gamma + 1, (batch,)))  # ragged
            same = agreement(case)
            size = {"vocab": vocab, "batch": batch, "gamma": gamma, "dtype": str(kind[0]).removeprefix("torch.")}
            rows.append({"mode": "fused"} | size | {"rows": batch, "agree": int(same.sum())})
        for batch, nodes in ((1, 32), (16, 8)):
            same = seeded_agreement(batch, nodes, vocab, args, args.seed + len(rows))
            size = {"vocab": vocab, "batch": batch, "nodes": nodes, "dtype": "bfloat16"}
            rows.append({"mode": "seeded"} | size | {"rows": same.numel(), "agree": int(same.sum())})
        total, agree = sum(r["rows"] for r in rows), sum(r["agree"] for r in rows)
        print(f"vocabulary {vocab}: kernel and oracle agree on {agree} of {total} rows so far", flush=True)
        worst = min(r["agree"] / r["rows"] for r in rows)
        write_results(path, {"rows": total, "agree": agree, "worst": worst, "seed": args.seed}, rows)
    if agree < 0.98 * total:
        raise RedrafterError(f"kernel and oracle agree on only {agree} of {total} rows; speed is not measured")


def measure(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    one = make_case(batch, args.gamma, args.vocab, args.device, seed=0)
    copies = 2 if args.device == "cpu" else max(COPIES, -(-COLD_BYTES // one.bytes))
    cases = [one, *(make_case(batch, args.gamma, args.vocab, args.device, seed=i) for i in range(1, copies))]
    agree = float(torch.cat([agreement(case) for case in cases[:4]]).float().mean())
    if agree < 0.97:
        raise RedrafterError(f"kernel and oracle agree on only {agree:.1%} of {batch} rows; not measured")
    contenders = (SYNCHRONISES if batch == 1 else {}) | NEVER_SYNCHRONISES

    def loop(contender: Contender) -> Callable[[], None]:
        def action() -> None:
            for case in cases:
                contender(case)

        return action

    turns = {(name, "eager"): loop(contender) for name, contender in contenders.items()}
    for action in turns.values():
        action()  # compile, and warm up the allocator
    if args.device != "cpu":
        turns |= {(name, "graph"): record(loop(contender)) for name, contender in NEVER_SYNCHRONISES.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    for _ in range(args.rounds):
        for key, action in turns.items():
            seconds[key].append(clock(action, args.device) / copies)
    read = sum(map(fused_bytes, cases)) / copies
    rows = []
    for (name, how), times in seconds.items():
        median = statistics.median(times)
        row = {"batch": batch, "contender": name, "how": how, "microseconds": median * 1e6, "copies": copies}
        if name == "fused":
            row |= {"bytes": read, "bytes_per_second": read / median, "agreement": agree}
        rows.append(row)
        print(row, flush=True)
    return rows


def filters(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the filter thresholds of B·(gamma + 1) rows, by the kernel and by sorting, taking turns."""
    logits = make_case(batch, args.gamma, args.vocab, args.device, seed=0).target
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    config = sampling.Sampling.of([params] * batch, args.vocab, args.device)
    seconds: dict[str, list[float]] = {"floors": [], "sorting": []}
    found: dict[str, Tensor] = {}

    def compute(name: str) -> None:
        floor = sampling.floor(logits, config)
        assert floor is not None
        found[name] = floor

    for turn in range(min(args.rounds, 5) + 1):
        for name in seconds:
            with kernels.force("triton" if name == "floors" else "naive"):
                took = clock(partial(compute, name), args.device)
            seconds[name] += [took] if turn else []  # the first round compiles
    agree = float(found["floors"].eq(found["sorting"]).float().mean())
    about = {"batch": batch, "how": "eager", "agreement": agree}
    rows = [about | {"contender": n, "microseconds": statistics.median(s) * 1e6} for n, s in seconds.items()]
    print(*rows, sep="\n", flush=True)
    return rows


def headline(rows: list[dict[str, Any]], bandwidth: float) -> dict[str, float]:
    """Return the speedups measured so far: one row in eager mode, 64 rows as CUDA graphs."""
    took = {(r["batch"], r["contender"], r["how"]): r["microseconds"] for r in rows}
    found = {}
    if (1, "fused", "eager") in took:
        found["b1_vs_transformers"] = took[1, "transformers", "eager"] / took[1, "fused", "eager"]
    if (64, "fused", "graph") in took:
        many = took[64, "fused", "graph"]
        found["b64_vs_transformers"] = took[64, "transformers_batched", "graph"] / many
        found["b64_vs_paper_exact"] = took[64, "paper_exact", "graph"] / many
        found["b64_vs_sigmoid"] = took[64, "sigmoid_lossy", "graph"] / many
        reads = {r["how"]: r["bytes_per_second"] for r in rows if (r["batch"], r["contender"]) == (64, "fused")}
        found["b64_bandwidth_fraction"] = reads["graph"] / bandwidth
    return found


def speed(args: argparse.Namespace) -> None:
    bandwidth = read_bandwidth(args.device)
    print(f"reads {bandwidth / 1e9:.0f} GB/s", flush=True)
    shape = {"gamma": args.gamma, "vocab": args.vocab, "dtype": "bfloat16", "read_bytes_per_second": bandwidth}
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        rows += [shape | row for row in (*measure(batch, args), *filters(batch, args))]
        print(headline(rows, bandwidth), flush=True)
        write_results(args.save, headline(rows, bandwidth), rows)


def smoke(_: TinyFiles) -> list[object]:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    words = ["--device", "cpu", "--vocab", 300, "--gamma", 2, "--batches", 1, "--rounds", 1]
    return [*words, "--vocabs", 257, "--grid", "2x2", "--seed", 0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="+", choices=["speed", "parity"], default=["speed", "parity"])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--gamma", type=int, default=5, help="drafted tokens per row")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--vocabs", type=int, nargs="+", default=VOCABS, help="vocabulary sizes of the parity grid")
    parser.add_argument(
        "--grid", type=pair, nargs="+", default=GRID, metavar="BxG", help="rows and drafted tokens of the parity grid"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="seed of the parity grid's inputs")
    parser.add_argument(
        "--save",
        type=Path,
        default=HERE / "results" / "verify_kernel.json",
        help="path of the results (JSON); verify_parity.json is written beside it",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    try:
        if "speed" in args.parts:
            check_new(args.save, args.overwrite)
        if "speed" in args.parts:
            speed(args)
        if "parity" in args.parts:
            parity(args)
    except RedrafterError as error:
        sys.exit(str(error))


def pair(text: str) -> tuple[int, int]:
    batch, gamma = text.split("x")
    return int(batch), int(gamma)


if __name__ == "__main__":
    main()
