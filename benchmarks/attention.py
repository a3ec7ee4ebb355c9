"""Time the tree attention kernel alone on a GPU, at a 7B model's heads, beside the time that reading the keys takes.

    python benchmarks/attention.py
    python benchmarks/attention.py --sweep      # other launch settings too, to find a better `plan`

A row is one pass of one layer: n nodes after a text of `context` tokens. Sixteen layers are recorded as one CUDA graph,
so keys and values are not in the GPU's caches. `floor_us` is the bytes of keys and values divided by the bandwidth that
a copy reaches in the same run. With --sweep, every setting must give the bits of the kernel's own plan.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/attention.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.core.tree import ancestors
from redrafter.kernels import compile_kernels, runs_triton
from redrafter.kernels.tree_attention import attend, pack_mask
from redrafter.results import check_new, write_results

LAYERS = 16
IN_ONE: dict[str, tuple[Any, ...]] = {
    "M": (16, 32),
    "newest_programs": (1, 2),
    "workers": (1, 2, 3, 4, 8, 11),
    "num_stages": (2, 3),
    "maxnreg": (168,),
}
SPLIT: dict[str, tuple[Any, ...]] = {
    "M": (16, 32, 64),
    "newest_programs": (0,),
    "workers": (1, 2, 3, 4, 8, 12),
    "num_stages": (2, 3),
}


class Pass:
    """One pass: queries, keys and values of several layers, and a tree of nodes behind the text."""

    def __init__(self, args: argparse.Namespace, n: int, context: int, slots: int) -> None:
        self.n, self.context, self.slots = n, context, slots
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        random = torch.Generator(args.device).manual_seed(n)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device=args.device, dtype=dtype)

        self.query = tensor(1, n, args.heads, args.size)
        self.layers = [tensor(2, 1, args.heads, slots, args.size) for _ in range(args.layers)]
        parents = torch.tensor([[0, *((i - 1) // 3 for i in range(1, n))]], device=args.device)
        depths = torch.zeros(1, n, dtype=torch.long, device=args.device)
        for i in range(1, n):
            depths[0, i] = depths[0, parents[0, i]] + 1
        self.deep = int(depths.max())
        lengths = torch.tensor([context], device=args.device)
        self.counters: dict[torch.device, Tensor] = {}
        self.packed = pack_mask(lengths, depths, ancestors(parents, self.deep), deep=self.deep)

    def run(self) -> Tensor:
        """All layers, one behind the other."""
        return torch.stack([self.run_layer(i) for i in range(len(self.layers))])

    def run_layer(self, layer: int) -> Tensor:
        keys, values = self.layers[layer]
        return attend(self.query, keys, values, self.packed, 0.1, self.counters)

    @property
    def bytes(self) -> int:
        """Keys and values that one layer reads."""
        heads, size = self.layers[0].shape[2], self.layers[0].shape[-1]
        return 2 * (self.context + self.n) * heads * size * self.query.element_size()


def seconds(action: Callable[[], object], rounds: int) -> float:
    """The median time of an action, recorded as a CUDA graph where there is a GPU."""
    action()
    repeat = action
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        repeat = graph.replay
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        repeat()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def settings(own: dict[str, Any], queries: int) -> Iterator[dict[str, Any]]:
    """Other launch settings, in one kernel and in three; what has an influence on the bits stays."""
    kept = {k: own[k] for k in ("BLOCK", "PRECISION", "num_warps")}
    for swept in (IN_ONE, SPLIT):
        for values in itertools.product(*swept.values()):
            other = dict(zip(swept, values, strict=True))
            if other["M"] <= max(16, queries):
                yield kept | other


def sweep(work: Pass, rounds: int) -> dict[str, Any]:
    """The fastest settings by queries per program and number of kernels, and how many settings gave other bits."""
    from redrafter.kernels.tree_attention import triton as kernel

    own, want = kernel.plan(work.query.shape[2], work.n, work.slots, work.query.dtype, work.query.shape[3]), work.run()
    others = list(settings(own, work.n))

    def with_setting(other: dict[str, Any]) -> Any:
        return mock.patch.object(kernel, "plan", side_effect=lambda *_: dict(other))

    def run_all() -> None:
        for other in others:
            with with_setting(other):
                work.run_layer(0)

    compile_kernels(run_all, work.query.device)
    best: dict[tuple[int, bool], tuple[float, dict[str, Any]]] = {}
    differ = 0
    for other in others:
        with with_setting(other):
            try:
                differ += not torch.equal(work.run(), want)
                took = 1e6 * seconds(work.run, rounds) / len(work.layers)
            except Exception as error:  # too much shared memory, too many registers
                print(other, str(error).splitlines()[0])
                continue
        kind = other["M"], other["newest_programs"] > 0
        if took < best.get(kind, (float("inf"), {}))[0]:
            best[kind] = round(took, 2), other
    return {"best": [{"us": us, **setting} for us, setting in best.values()], "settings_with_other_bits": differ}


def smoke(_: TinyFiles) -> list[object]:
    words = ["--device", "cpu", "--heads", 2, "--size", 16, "--layers", 2, "--rounds", 1]
    return [*words, "--nodes", 1, 4, "--contexts", 20]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "attention.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="values of a head")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 300, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--slots", type=int, help="slots of the cache (default: as many as are used, in steps of 256)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="try other launch settings")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    one, other = torch.zeros(2, 1 << (30 if args.device == "cuda" else 10), dtype=torch.uint8, device=args.device)
    bandwidth = 2 * len(one) / seconds(lambda: one.copy_(other), args.rounds)
    rows: list[dict[str, Any]] = []
    for context, n in itertools.product(args.contexts, args.nodes):
        work = Pass(args, n, context, args.slots or -(-(context + n) // 256) * 256)
        took = seconds(work.run, args.rounds) / args.layers
        row = {"nodes": n, "context": context, "slots": work.slots, "us": round(1e6 * took, 2)}
        row["floor_us"] = round(1e6 * work.bytes / bandwidth, 2)
        if args.sweep and runs_triton(work.query.device):
            row |= sweep(work, args.rounds)
        rows.append(row)
        print(row, flush=True)
        write_results(args.save, {"bandwidth_gb_s": round(bandwidth / 1e9)}, rows)


if __name__ == "__main__":
    main()
