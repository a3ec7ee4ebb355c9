"""Compare speculative texts on a GPU with plain decoding, token by token with `==`: no rule for ties.

    python benchmarks/exact_gpu.py

Parts: `small` (the default model in bf16), `half` (the same in fp16), `wide` (the default model at 7B cost), `dense` (a
Llama of 7B shape with dense random weights: a widened model is mostly zeros, which hides wrong orders of summation),
`served` (requests under load: mixed parameters, cancels, shared prefixes, prompts in pieces; each finished answer is
compared with plain decoding of the request alone). Results are written after each part.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/exact_gpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import arguments, first_turns, parse
from benchmarks.mixed_load import KINDS, EveryShape, MixedLoad
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import SMOKE, load_wide
from redrafter import Engine, Shape, load
from redrafter.drafters import RecurrentConfig, RecurrentDrafter, RecurrentNet, WithNgrams
from redrafter.engine.request import Request
from redrafter.engine.ties import first_difference
from redrafter.results import check_new, write_results
from redrafter.runtime.batch import Batch
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.targets import Target, load_target

PARTS = ("small", "wide", "dense", "served", "half")
LONG = (3000, 8000)
"""The lengths of long prompts, in tokens."""
SERVED_SHAPES = ("16x5:63", "8x5:31", "8x4:15", "4x3:7", "2x2:3")
SEED = 11


class ExactBenchmark:
    """The results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.prompts = first_turns(args.questions, args.prompts)

    def load(self, dtype: str) -> Engine:
        """The model and its drafter as they are."""
        args = self.args
        beam = Shape.of(args.beam)
        return load(args.model, args.drafter, dtype=dtype, device=args.device, shape=beam, runtime=args.runtime)

    def save(self) -> None:
        alone = [r for r in self.rows if r["part"] != "served"]
        loaded = [r for r in self.rows if r["part"] == "served"]
        headline: dict[str, float] = {
            "texts": sum(r["texts"] for r in alone),
            "equal": sum(r["equal"] for r in alone),
            "ties_needed": sum(r["texts"] - r["equal"] for r in self.rows),
            "under_load_texts": sum(r["texts"] for r in loaded),
            "under_load_equal": sum(r["equal"] for r in loaded),
        }
        write_results(self.args.save, headline, self.rows)

    def compare(self, part: str, target: str, engine: Engine, requests: list[Request], **about: Any) -> None:
        """Write each request alone, speculatively and plainly; count the texts that are equal."""
        plain = engine.plain()
        began, tokens, steps, differences = time.perf_counter(), 0, 0, []
        for i, request in enumerate(requests):
            fast, slow = engine.complete([request])[0], plain.complete([request])[0]
            tokens, steps = tokens + len(slow.tokens), steps + fast.stats.steps
            if fast.tokens != slow.tokens:
                differences.append({"text": i, "token": first_difference(fast.tokens, slow.tokens)})
        row = {
            "part": part,
            "target": target,
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "texts": len(requests),
            "equal": len(requests) - len(differences),
            "prompt_tokens": [min(len(r.prompt) for r in requests), max(len(r.prompt) for r in requests)],
            "tokens": tokens,
            "tokens_per_step": round(tokens / max(steps, 1), 3),
            "seconds": round(time.perf_counter() - began, 1),
            "differences": differences[:20],
        }
        self.rows.append(row | about)
        print(self.rows[-1], flush=True)
        self.save()

    def texts(self, part: str, target: str, engine: Engine) -> None:
        """Prompts of the question file and long ones, at both temperatures."""
        for temperature in (0.0, 1.0):
            options = {"temperature": temperature, "seed": SEED, "max_new_tokens": self.args.tokens}
            requests = engine.requests(self.prompts, ignore_eos=True, **options)
            self.compare(part, target, engine, requests, temperature=temperature)
            long = engine.requests(self._long(engine.target), ignore_eos=True, **options)
            self.compare(part, target, engine, long, temperature=temperature, long=True)

    def _long(self, target: Target) -> list[str]:
        """Texts of many tokens: questions one behind the other, each text beginning with another one."""
        words = [m[0]["content"] for m in first_turns(self.args.questions, 80)]
        limit = target.max_positions - self.args.tokens - 1
        ends = [
            min(limit, n)
            for n in torch.linspace(self.args.long[0], self.args.long[1], self.args.long_prompts).long().tolist()
        ]
        texts = []
        for i, end in enumerate(ends):
            text = "\n\n".join((words[i:] + words[:i]) * 4)
            texts.append(target.tokenizer.decode(target.tokenizer.encode(text)[: end - 8]))
        return texts


def small(bench: ExactBenchmark, dtype: str = "bf16", part: str = "small") -> None:
    args = bench.args
    engine = bench.load(dtype)
    if part == "small":
        bench.texts(part, engine.target.name, engine)
        return
    prompts = bench.prompts[: max(1, len(bench.prompts) // 5)]
    options = {"temperature": 1.0, "seed": SEED, "max_new_tokens": args.tokens}
    bench.compare(
        part, engine.target.name, engine, engine.requests(prompts, ignore_eos=True, **options), temperature=1.0
    )


def half(bench: ExactBenchmark) -> None:
    small(bench, "fp16", "half")


def wide(bench: ExactBenchmark) -> None:
    args = bench.args
    target, drafter, label = load_wide(args.shape, args.device, drafter_budget=args.budget, model=args.model)
    bench.texts("wide", label, Engine(target, WithNgrams(drafter), shape=Shape.of(args.beam), runtime=args.runtime))


def dense(bench: ExactBenchmark) -> None:
    """Random weights and tokens at T = 1; the drafter is random too, so most steps accept nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    args = bench.args
    size: dict[str, int] = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    size |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
    if args.shape == SMOKE:
        size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        size |= {"num_key_value_heads": 2, "vocab_size": 99}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    try:
        with torch.device(args.device):
            model = LlamaForCausalLM(LlamaConfig(**size, eos_token_id=None, max_position_embeddings=2048)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    target = load_target(model)
    layers = (1, target.layer_count // 2, -1)
    config = RecurrentConfig(
        vocab_size=target.vocab_size, context_size=3 * target.hidden_size, embedding_size=target.hidden_size,
        state_size=256,
        exit_size=256, layers=layers, cell="gated", first_state="context", normed=True, memory_heads=4,
    )  # fmt: skip
    drafter = RecurrentDrafter(RecurrentNet(config).to(args.device, dtype), target)
    engine = Engine(target, drafter, shape=Shape.of(args.beam), runtime=args.runtime)
    chance = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(target.vocab_size, (20 + 61 * i,), generator=chance).tolist()
        for i in range(max(1, args.prompts // 5))
    ]
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": SEED, "max_new_tokens": args.tokens, "ignore_eos": True}
        bench.compare("dense", "random Llama of 7B shape", engine, engine.requests(prompts, **options),
                      temperature=temperature)  # fmt: skip


def served(bench: ExactBenchmark) -> None:
    """Requests under load, as many at once as there are rows."""
    args = bench.args
    engine = bench.load("bf16")
    shapes = [Shape.of(s) for s in SERVED_SHAPES]
    batch = Batch(engine.target, engine.drafter, rows=args.rows, context=1024, kept=args.rows // 4, shapes=shapes)
    scheduler = Scheduler(batch, EveryShape(shapes), Limits(queue=2 * args.requests, chunk=64))
    mixed = MixedLoad(engine, args.questions, args.requests, args.tokens)
    began = time.perf_counter()
    finished = mixed.run(scheduler, 0.15, args.seconds)
    seconds = time.perf_counter() - began
    plain = engine.plain()
    differences = []
    for i in finished:
        alone = plain.complete([mixed.requests[i]])[0].tokens
        if alone != mixed.answers[i]:
            at = first_difference(alone, mixed.answers[i])
            differences.append({"request": i, "kind": i % len(KINDS), "token": at, "drafts": mixed.jobs[i].drafts})
    metrics = scheduler.metrics
    bench.rows.append(
        {
            "part": "served",
            "target": engine.target.name,
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "rows": args.rows,
            "requests": len(mixed.jobs),
            "texts": len(finished),
            "equal": len(finished) - len(differences),
            "cancelled": metrics.finished["cancelled"],
            "prompt_tokens_reused": metrics.reused_tokens,
            "steps_by_shape": {str(k): v for k, v in metrics.steps.items()},
            "seconds": round(seconds, 1),
            "differences": differences[:20],
        }
    )
    print(bench.rows[-1], flush=True)
    bench.save()


RUN: dict[str, Callable[[ExactBenchmark], None]] = {
    "small": small, "half": half, "wide": wide, "dense": dense, "served": served,
}  # fmt: skip


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions, "--device", "cpu"]
    words += ["--shape", SMOKE, "--prompts", 1, "--tokens", 4, "--long-prompts", 1, "--long", 20, 30, "--beam", "2x2:3"]
    return [*words, "--parts", "small", "served", "--requests", 3, "--rows", 2, "--seconds", 0.1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "exact_gpu.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="vicuna-7b", help="the larger model's shape")
    parser.add_argument("--budget", default="100M", help="parameters of the widened drafter")
    parser.add_argument("--beam", default="16x5:63")
    parser.add_argument("--runtime", default="auto", help="graphs: record steps without compiling them")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--long-prompts", type=int, default=10)
    parser.add_argument("--long", type=int, nargs=2, default=LONG, help="tokens of the shortest and longest of them")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5, help="cancel within this time")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    bench = ExactBenchmark(args)
    for part in args.parts:
        RUN[part](bench)


if __name__ == "__main__":
    main()
