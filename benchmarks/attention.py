"""Time the tree attention kernel alone on a GPU, at a 7B model's heads, beside the time that reading the keys takes.

    python benchmarks/attention.py
    python benchmarks/attention.py --sweep      # other launch settings too, to find a better `plan`

A result is one pass of one layer: n nodes of each row, after texts of `context` tokens, beside a piece of another
row's prompt. Sixteen layers are recorded as one CUDA graph, so keys and values are not in the GPU's caches. `floor_us`
is the bytes of keys and values divided by the bandwidth that a copy reaches in the same run. With --sweep, every
setting must give the bits of the kernel's own plan.
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
from redrafter.core.flat import Piece, of_pieces
from redrafter.core.tree import ancestors
from redrafter.kernels import compile_kernels, runs_triton
from redrafter.kernels.flatten.naive import flatten
from redrafter.kernels.tree_attention import attend, tiles
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
    """One pass: queries, keys and values of several layers, a tree of n nodes behind each row's text, and a piece."""

    def __init__(self, args: argparse.Namespace, rows: int, n: int, context: int, slots: int) -> None:
        self.context, self.slots = context, slots
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        random = torch.Generator(args.device).manual_seed(n)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device=args.device, dtype=dtype)

        self.tokens: int = args.piece + rows * n
        self.query = tensor(self.tokens, args.heads, args.size)
        places = rows + bool(args.piece)
        self.layers = [tensor(2, places, args.kv_heads, slots, args.size) for _ in range(args.layers)]
        parents = torch.tensor([[0, *((i - 1) // 3 for i in range(1, n))]])
        mask = ancestors(parents, n).expand(rows, n, n)
        lengths = torch.full((rows,), context)
        pieces = [Piece(rows, context, [0] * args.piece)] if args.piece else []
        flat = of_pieces(pieces, slots, self.tokens, places)
        given = mask.sum(-1) - 1, mask, torch.ones(rows, n, dtype=torch.bool), lengths, torch.arange(rows)
        flatten(torch.zeros(rows, n).long(), *given, slots, flat.lines, flat.runs[len(pieces) :], args.piece)
        self.lines, self.runs = flat.lines.to(args.device), flat.runs.to(args.device)
        self.counters: dict[torch.device, Tensor] = {}
        self.divide()

    def divide(self) -> None:
        """Make the table of tiles by the kernel's plan."""
        _, heads, size = self.query.shape
        kv_heads = self.layers[0].shape[2]
        self.tiles = tiles(self.runs, self.tokens, heads, kv_heads, size, self.slots, self.query.dtype)
        if self.query.device.type == "cuda":
            torch.cuda.synchronize()  # the first layer reads the table before it waits

    def run(self) -> Tensor:
        """All layers, one behind the other."""
        return torch.stack([self.run_layer(i) for i in range(len(self.layers))])

    def run_layer(self, layer: int) -> Tensor:
        keys, values = self.layers[layer]
        return attend(self.query, keys, values, self.lines, self.tiles, 0.1, self.counters)

    @property
    def bytes(self) -> int:
        """Keys and values that one layer reads."""
        shape = self.layers[0].shape  # keys and values, places, key heads, slots, values of a head
        return 2 * (shape[1] * self.context + self.tokens) * shape[2] * shape[4] * self.query.element_size()


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
    """Other launch settings, in one kernel and in three, for the queries of a run; what influences the bits stays."""
    kept = {k: own[k] for k in ("BLOCK", "PRECISION", "num_warps")}
    for swept in (IN_ONE, SPLIT):
        for values in itertools.product(*swept.values()):
            other = dict(zip(swept, values, strict=True))
            if other["M"] <= max(16, queries):
                yield kept | other


def sweep(work: Pass, rounds: int) -> dict[str, Any]:
    """The fastest settings by queries per program and number of kernels, and how many settings gave other bits."""
    from redrafter.kernels.tree_attention import triton as kernel

    own, want = work.tiles.settings, work.run()
    heads = work.query.shape[1]
    others = list(settings(own, heads // work.layers[0].shape[2] * (work.tokens // len(work.runs))))

    def with_setting(other: dict[str, Any]) -> Any:
        return mock.patch.object(kernel, "plan", side_effect=lambda *_: dict(other))

    def run_all() -> None:
        for other in others:
            with with_setting(other):
                work.divide()
                work.run_layer(0)

    compile_kernels(run_all, work.query.device)
    best: dict[tuple[int, bool], tuple[float, dict[str, Any]]] = {}
    differ = 0
    for other in others:
        with with_setting(other):
            try:
                work.divide()
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
    words = ["--device", "cpu", "--heads", 2, "--kv-heads", 1, "--size", 16, "--layers", 2, "--rounds", 1]
    return [*words, "--rows", 1, 2, "--nodes", 1, 4, "--piece", 3, "--contexts", 20]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "attention.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="values of a head")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--piece", type=int, default=0, help="tokens of another row's prompt in the same pass")
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
    for rows_in_pass, context, n in itertools.product(args.rows, args.contexts, args.nodes):
        work = Pass(args, rows_in_pass, n, context, args.slots or -(-(context + max(n, args.piece)) // 256) * 256)
        took = seconds(work.run, args.rounds) / args.layers
        row = {
            "rows": rows_in_pass,
            "nodes": n,
            "piece": args.piece,
            "context": context,
            "slots": work.slots,
            "us": round(1e6 * took, 2),
        }
        row["floor_us"] = round(1e6 * work.bytes / bandwidth, 2)
        if args.sweep and runs_triton(work.query.device):
            row |= sweep(work, args.rounds)
        rows.append(row)
        print(row, flush=True)
        write_results(args.save, {"bandwidth_gb_s": round(bandwidth / 1e9)}, rows)


if __name__ == "__main__":
    main()
