"""The drafter in MLX on a CPU: texts against mlx-lm's own greedy texts, tokens/step against the torch engine's.

    .venv-mlx/bin/python benchmarks/mlx_cpu.py          (`make setup-mlx` makes that environment)

Parts: `torch` (redrafter's own engine), `fp32`, `q4` (4-bit weights by mlx-lm, fp32 activations), `bf16`: the default
model's greedy texts in batches, saved after each. Parts can be measured in several runs; `--with` takes in the rows of
earlier ones.
A text that parts from mlx-lm's is a tie if mlx-lm's own logits of the two tokens differ by less than rounding. `speed`
times mlx-lm and redrafter-mlx in turn, one text at a time: a rough figure, since MLX is made for Metal. MLX's Linux
wheel brings the reference BLAS; `LD_PRELOAD=libopenblas.so.0` in front of the command makes fp32 several times faster.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/mlx_cpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redrafter
from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter import Shape
from redrafter.drafters import checkpoint, shipped
from redrafter.drafters.recurrent import RecurrentDrafter
from redrafter.drafters.with_ngrams import WithNgrams
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model

PARTS = ("torch", "fp32", "q4", "bf16", "speed")
ROUNDING = {"fp32": 2**-16, "q4": 2**-16, "bf16": 2**-5}
"""Difference of two logits, relative to their size, that rounding along a pass explains."""


def load_engine(part: str, model: Path, drafter: str, shape: str) -> Any:
    """redrafter-mlx around the model in fp32, in 4-bit weights with fp32 activations, or in bf16."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model

    from redrafter_mlx.api import load_model, wrap

    loaded, tokenizer, config = load_model(str(model))
    loaded.set_dtype(mx.bfloat16 if part == "bf16" else mx.float32)
    if part == "q4":
        loaded, _ = quantize_model(loaded, config, group_size=32, bits=4)
    return wrap(loaded, tokenizer, name=model.name, drafter=drafter, shape=shape)


def mlx_texts(engine: Any, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """mlx-lm's own greedy texts, without the token that ends them."""
    from mlx_lm import batch_generate

    model, tokenizer = engine.target.model, engine.target.tokenizer
    done = batch_generate(model, tokenizer, list(prompts), max_tokens=tokens, return_token_ids=True)
    return list(done.token_ids)


def parting(
    engine: Any, prompt: list[int], plain: list[int], fast: list[int], rounding: float
) -> dict[str, Any] | None:
    """Where two texts part, by how much mlx-lm's logits of the two tokens differ there, and whether that is a tie."""
    import mlx.core as mx

    at = next((i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b), min(len(plain), len(fast)))
    if at == len(plain) == len(fast):
        return None
    logits = engine.target.model(mx.array([prompt + plain[:at]]))[0, -1].astype(mx.float32)
    ends = engine.eos_tokens()[:1]  # a text that is shorter ends here
    first, second = ((text + ends)[at : at + 1] for text in (plain, fast))
    if not first or not second:
        return {"index": at, "gap": None, "tie": False}
    one, other = float(logits[first[0]]), float(logits[second[0]])
    return {"index": at, "gap": one - other, "tie": abs(one - other) <= rounding * max(abs(one), abs(other), 1.0)}


def compare(part: str, engine: Any, prompts: Sequence[list[int]], tokens: int, batch: int) -> Iterator[dict[str, Any]]:
    """Count equal texts and ties; sum up tokens/step. Yields what is known after each batch."""
    ends = set(engine.eos_tokens())
    apart: list[dict[str, Any]] = []
    texts = gained = steps = 0
    taken = {"plain_seconds": 0.0, "seconds": 0.0}
    for begin in range(0, len(prompts), batch):
        some = [list(p) for p in prompts[begin : begin + batch]]
        began = time.perf_counter()
        plain = mlx_texts(engine, some, tokens)
        between = time.perf_counter()
        done = engine.generate(some, max_new_tokens=tokens, batch_size=batch)
        taken["plain_seconds"] += between - began
        taken["seconds"] += time.perf_counter() - between
        fast = [c.tokens[:-1] if c.tokens[-1] in ends else c.tokens for c in done]
        for prompt, a, b in zip(some, plain, fast, strict=True):
            found = parting(engine, prompt, a, b, ROUNDING[part])
            apart += [] if found is None else [found]
        texts += len(some)
        gained += sum(len(c.tokens) - 1 for c in done)
        steps += sum(c.stats.steps for c in done)
        yield {
            "part": part,
            "drafter": engine.drafter.name,
            "shape": engine.shape.label,
            "texts": texts,
            "tokens": tokens,
            "batch": batch,
            "equal": texts - len(apart),
            "ties": sum(d["tie"] for d in apart),
            "wrong": sum(not d["tie"] for d in apart),
            "tokens_per_step": gained / max(1, steps),
            **taken,
            "differences": list(apart),
        }


def speed(engine: Any, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Seconds of mlx-lm's own generation and of ours, one text at a time, prompts included."""
    from mlx_lm import stream_generate

    taken = {"plain": 0.0, "speculative": 0.0}
    for prompt in prompts:
        began = time.perf_counter()
        for _ in stream_generate(engine.target.model, engine.target.tokenizer, prompt, max_tokens=tokens):
            pass
        between = time.perf_counter()
        engine.generate(list(prompt), max_new_tokens=tokens)
        taken["plain"] += between - began
        taken["speculative"] += time.perf_counter() - between
    seconds = {f"{name}_seconds": s for name, s in taken.items()}
    row = {"part": "speed", "shape": engine.shape.label, "texts": len(prompts), "tokens": tokens}
    return row | seconds | {"vs_plain": taken["plain"] / taken["speculative"], "load": os.getloadavg()}


def torch_tokens_per_step(own: redrafter.Engine, drafter: str, prompts: Any, tokens: int, batch: int) -> dict[str, Any]:
    """tokens/step of redrafter's torch engine on the same prompts, with the same shape.

    The drafter computes in fp32, as it does in MLX; by default redrafter's CPU kernels round its weights and the output
    embedding to int8, which changes some guesses.
    """
    folder = shipped.find(own.target) if drafter == "auto" else Path(drafter.removesuffix("+ngram"))
    assert folder is not None
    exact = WithNgrams(RecurrentDrafter(checkpoint.read_for(folder, own.target), own.target))  # type: ignore[arg-type]
    engine = redrafter.Engine(own.target, exact, shape=own.shape)
    done = engine.generate(prompts, max_new_tokens=tokens, temperature=0.0, batch_size=batch)
    gained = sum(c.stats.tokens - 1 for c in done)
    return {"prompts": len(prompts), "tokens": tokens, "tokens_per_step": gained / sum(c.stats.steps for c in done)}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of another run's file, each with the command and the commit that measured it."""
    result = json.loads(path.read_text())
    return [{name: result[name] for name in ("command", "commit", "date")} | row for row in result["rows"]]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The headline: texts of all parts; tokens/step in fp32 of both engines; speed."""
    texts = [r for r in rows if "equal" in r]
    headline = {name: float(sum(r[name] for r in texts)) for name in ("texts", "equal", "ties", "wrong")}
    by_part = {r["part"]: r for r in rows}
    for name, part, value in (
        ("tokens_per_step", "fp32", "tokens_per_step"),
        ("tokens_per_step_torch", "torch", "tokens_per_step"),
        ("vs_plain", "speed", "vs_plain"),
    ):
        if part in by_part:
            headline[name] = by_part[part][value]
    return headline


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--questions", tiny.questions, "--prompts", 2, "--tokens", 6, "--few-prompts", 2, "--few-tokens", 6]
    return [*words, "--timed", 1, "--model", tiny.model, "--drafter", tiny.drafter, "--batch", 2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "mlx_cpu.json")
    parser.add_argument("--model", type=Path, help="a folder of a model (the default model if not given)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--shape", default="2x3:4")
    parser.add_argument(
        "--prompts", type=int, default=40, help="questions of the part fp32, spread over the categories"
    )
    parser.add_argument("--tokens", type=int, default=64, help="at most this many new tokens per text")
    parser.add_argument("--few-prompts", type=int, default=40, help="shortest questions, for the parts q4 and bf16")
    parser.add_argument("--few-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="texts written at once, except in the part `speed`")
    parser.add_argument("--timed", type=int, default=4, help="questions of the part `speed`")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--with", dest="others", nargs="+", type=Path, default=[], help="take in rows of other runs")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    rows = [row for other in args.others for row in rows_of(other)]
    model = args.model or default_model()
    torch_drafter = args.drafter if args.drafter == "auto" else f"{args.drafter}+ngram"
    own = redrafter.load(str(model), torch_drafter, device="cpu", dtype="fp32", shape=Shape.of(args.shape))
    prompts = [own.encode(turn) for turn in first_turns(args.questions, args.prompts)]
    every = [own.encode(turn) for turn in first_turns(args.questions, 80)]
    few = sorted(every, key=len)[: args.few_prompts]
    if "torch" in args.parts:
        found = torch_tokens_per_step(own, torch_drafter, prompts, args.tokens, args.batch)
        rows.append({"part": "torch", "shape": args.shape} | found)
        print(rows[-1], flush=True)
    own.close()
    for part in ("fp32", "q4", "bf16"):
        if part not in args.parts and not (part == "fp32" and "speed" in args.parts):
            continue
        engine = load_engine(part, model, torch_drafter, args.shape)
        if part in args.parts:
            these, tokens = (prompts, args.tokens) if part == "fp32" else (few, args.few_tokens)
            before = list(rows)
            for row in compare(part, engine, these, tokens, args.batch):
                rows = [*before, row | {"blas": os.environ.get("LD_PRELOAD", "")}]
                write_results(args.save, summary(rows), rows)
                print({k: v for k, v in rows[-1].items() if k != "differences"}, flush=True)
        if part == "fp32" and "speed" in args.parts:
            rows.append(speed(engine, prompts[:: max(1, len(prompts) // args.timed)][: args.timed], args.few_tokens))
            print(rows[-1], flush=True)
        engine.close()
    write_results(args.save, headline := summary(rows), rows)
    print(headline)


if __name__ == "__main__":
    main()
