"""Verification alone, on a GPU: from the logits of target and drafter to the new tokens.

    python benchmarks/verify_kernel.py

Contenders take turns, a figure is the median over the rounds. Each reads bf16 logits that were not read just before:
as many copies as fill several caches are verified in a row, and the time is divided by their number. `eager` is that
loop as Python runs it; `graph` the same loop recorded as one CUDA graph, for contenders that never wait for the host.
transformers' own function waits and takes one row; for more rows it is restated in batched torch that does not wait,
which can only help it. Logits are tempered and filtered already, for all contenders.

With `--device cpu` it runs the plain torch functions at a small size, to see that it runs; it writes no results then.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from redrafter.core import verify
from redrafter.core.verify import rejection_from_logits
from redrafter.errors import RedrafterError
from redrafter.kernels.verify import paper
from redrafter.results import check_new, write_results

SAVE = Path(__file__).parent / "results" / "verify_kernel.json"
BATCHES = (1, 16, 64)
COLD_BYTES = 256 * 2**20
"""Logits verified in one turn, at least: several times what a GPU's last cache holds."""


@dataclass(frozen=True)
class Case:
    """One verification to do."""

    target: Tensor  # (B, G+1, V)
    draft: Tensor  # (B, G, V)
    tokens: Tensor  # (B, G) sampled from the draft's logits
    rows: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return self.target.nbytes + self.draft.nbytes


def make_case(batch: int, gamma: int, vocab: int, device: str, seed: int) -> Case:
    """A peaked target and a drafter that is often right, tokens truly sampled from it."""
    torch.manual_seed(seed)
    target = (torch.randn(batch, gamma + 1, vocab, device=device) * 3).bfloat16()
    draft = (target[:, :gamma] + torch.randn(batch, gamma, vocab, device=device) * 0.5).bfloat16()
    weights = draft.float().softmax(-1).flatten(0, 1)
    rows = {
        "counts": torch.full((batch,), gamma, device=device),
        "temperature": torch.ones(batch, device=device),
        "seeds": torch.arange(batch, device=device) + seed * 1000,
        "positions": torch.arange(batch, device=device),
    }
    return Case(target, draft, torch.multinomial(weights, 1).view(batch, gamma), rows)


Found = tuple[Tensor, Tensor]


def fused(case: Case) -> Found:
    return rejection_from_logits(case.target, case.draft, case.tokens, **case.rows)


def given_numbers(case: Case) -> tuple[Tensor, Tensor]:
    """What the paper's ways draw from torch's generator: coins, and exponentials as torch.multinomial draws them."""
    device = case.target.device
    race = torch.empty(len(case.tokens), case.target.shape[-1], device=device).exponential_()
    return torch.rand(case.tokens.shape, device=device), race


def paper_exact(case: Case) -> Found:
    return paper.paper_exact(case.target, case.draft, case.tokens, case.rows["counts"], *given_numbers(case))


def sigmoid_lossy(case: Case) -> Found:
    return paper.sigmoid_lossy(case.target, case.draft, case.tokens, case.rows["counts"], *given_numbers(case))


def transformers_own(case: Case) -> Found:
    return _speculative_sampling(case.tokens, case.draft, case.tokens.shape[1], case.target)


def transformers_as_called(case: Case) -> Found:
    """With the conversion to fp32 that `generate` does before it."""
    return _speculative_sampling(case.tokens, case.draft.float(), case.tokens.shape[1], case.target.float())


def transformers_batched(case: Case) -> Found:
    """Its function, statement by statement, for many rows and without waiting for the host."""
    gamma = case.tokens.shape[1]
    q, p = case.draft.softmax(-1), case.target.softmax(-1)
    q_i = q.gather(2, case.tokens[..., None])[..., 0]
    p_i = p[:, :gamma].gather(2, case.tokens[..., None])[..., 0]
    ratio = p_i / q_i
    is_accepted = torch.rand_like(ratio) <= ratio
    n_matches = ((~is_accepted).cumsum(-1) < 1).sum(-1)
    row = torch.arange(len(n_matches), device=p.device)
    p_next = p[row, n_matches]
    p_prime = (p_next - q[row, n_matches.clamp(max=gamma - 1)]).clamp(min=0)
    p_prime = p_prime / p_prime.sum(-1, keepdim=True)
    p_prime = torch.where((n_matches < gamma)[:, None], p_prime, p_next)
    drawn = (p_prime / torch.empty_like(p_prime).exponential_()).argmax(-1)  # as torch.multinomial, less its checks
    new = torch.cat([case.tokens, drawn[:, None]], 1)
    return new.scatter(1, n_matches[:, None], drawn[:, None]), n_matches


Contender = Callable[[Case], Found]
WAITS: dict[str, Contender] = {"transformers": transformers_own, "transformers_fp32": transformers_as_called}
NEVER_WAITS: dict[str, Contender] = {
    "transformers_batched": transformers_batched,
    "paper_exact": paper_exact,
    "sigmoid_lossy": sigmoid_lossy,
    "fused": fused,
}


def clock(action: Callable[[], Any], device: str) -> float:
    """Seconds, on the device's own clock where it has one."""
    if device == "cpu":
        began = time.perf_counter()
        action()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def record(action: Callable[[], Any]) -> Callable[[], None]:
    """The action as a CUDA graph."""
    side = torch.cuda.Stream()
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
    """Bytes/s at which this machine reads, by the faster of two reductions over an array far larger than its caches."""
    count = 2**29 if device != "cpu" else 2**22
    data = torch.zeros(count, device=device)
    best = 0.0
    for reduce in (torch.sum, torch.amax):
        reduce(data)
        seconds = [clock(lambda reduce=reduce: reduce(data), device) for _ in range(20)]
        best = max(best, data.nbytes / statistics.median(seconds))
    return best


def fused_bytes(case: Case) -> int:
    """Logits the fused kernel reads: all drafted rows of p and q, then both again where it refused, or p's last."""
    _, accepted = fused(case)
    gamma, vocab = case.tokens.shape[1], case.target.shape[-1]
    second = torch.where(accepted < gamma, 2, 1).sum().item()
    return case.target.element_size() * vocab * (2 * gamma * len(accepted) + int(second))


def check(cases: list[Case]) -> float:
    """Share of rows where kernel and oracle say the same; little below 1, since numbers within rounding may differ."""
    kernels = verify.on_kernel
    same = []
    for case in cases:
        mine, n = fused(case)
        verify.on_kernel = lambda *_: False
        want, m = fused(case)
        verify.on_kernel = kernels
        real = torch.arange(want.shape[1], device=want.device) <= m[:, None]
        same.append(((n == m) & ((mine == want) | ~real).all(1)).float().mean())
    return float(torch.stack(same).mean())


def measure(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    one = make_case(batch, args.gamma, args.vocab, args.device, seed=0)
    copies = 2 if args.device == "cpu" else -(-COLD_BYTES // one.bytes)
    cases = [one, *(make_case(batch, args.gamma, args.vocab, args.device, seed=i) for i in range(1, copies))]
    agreement = check(cases[:4])
    if agreement < 0.97:
        raise RedrafterError(f"kernel and oracle agree on only {agreement:.1%} of {batch} rows; not measured")
    contenders = (WAITS if batch == 1 else {}) | NEVER_WAITS

    def loop(contender: Contender) -> Callable[[], None]:
        def action() -> None:
            for case in cases:
                contender(case)

        return action

    turns = {(name, "eager"): loop(contender) for name, contender in contenders.items()}
    for action in turns.values():
        action()  # compile, and fill the allocator
    if args.device != "cpu":
        turns |= {(name, "graph"): record(loop(contender)) for name, contender in NEVER_WAITS.items()}
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
            row |= {"bytes": read, "bytes_per_second": read / median, "agreement": agreement}
        rows.append(row)
        print(row, flush=True)
    return rows


def headline(rows: list[dict[str, Any]], bandwidth: float) -> dict[str, float]:
    """How many times as fast as others; at one row as Python runs them, at 64 as graphs."""
    took = {(r["batch"], r["contender"], r["how"]): r["microseconds"] for r in rows}
    reads = {(r["batch"], r["how"]): r["bytes_per_second"] for r in rows if r["contender"] == "fused"}
    many = took[64, "fused", "graph"]
    return {
        "b1_vs_transformers": took[1, "transformers", "eager"] / took[1, "fused", "eager"],
        "b64_vs_transformers": took[64, "transformers_batched", "graph"] / many,
        "b64_vs_paper_exact": took[64, "paper_exact", "graph"] / many,
        "b64_vs_sigmoid": took[64, "sigmoid_lossy", "graph"] / many,
        "b64_bandwidth_fraction": reads[64, "graph"] / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--gamma", type=int, default=5, help="drafted tokens per row")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=Path, default=SAVE, help="where the JSON goes")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    args = parser.parse_args()
    try:
        if args.device == "cuda":
            check_new(args.save, args.overwrite)
        bandwidth = read_bandwidth(args.device)
        print(f"reads {bandwidth / 1e9:.0f} GB/s", flush=True)
        rows = [row for batch in BATCHES for row in measure(batch, args)]
    except RedrafterError as error:
        sys.exit(str(error))
    if args.device == "cpu":
        print("a dry run: nothing is written")
        return
    found = headline(rows, bandwidth)
    print(found)
    shape = {"gamma": args.gamma, "vocab": args.vocab, "dtype": "bfloat16", "read_bytes_per_second": bandwidth}
    write_results(args.save, found, [shape | row for row in rows])


if __name__ == "__main__":
    main()
