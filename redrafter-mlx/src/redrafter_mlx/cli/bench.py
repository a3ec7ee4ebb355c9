"""`redrafter-mlx bench`: the papers' on-device table: beam widths, lengths and precisions, tokens/s and speedup."""

import argparse
import json
from pathlib import Path
from typing import Any

from redrafter_mlx.cli.doctor import machine
from redrafter_mlx.cli.options import PROMPTS, add_model, as_prompt
from redrafter_mlx.config import Shape
from redrafter_mlx.errors import ConfigError

PRECISIONS = ("fp16", "bf16", "8bit", "4bit")


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape=False)
    parser.add_argument("--precisions", nargs="+", choices=("fp32", *PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 3, 4], help="beam widths")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2, 3, 4, 5], help="beam lengths")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each text (64)")
    parser.add_argument("--out", type=Path, default=Path("redrafter-mlx-bench.json"), help="the results file")


def load(args: argparse.Namespace, precision: str) -> Any:
    """The model in this precision, cast or quantised by mlx-lm; a model that is quantised already stays as it is."""
    import mlx.core as mx

    import redrafter_mlx

    engine, tokenizer = redrafter_mlx.load(args.model, drafter="none")
    model = engine.target.model
    engine.close()
    if engine.target.quantised:
        raise ConfigError(f"{args.model} is quantised already: bench needs the model in full precision")
    model.set_dtype({"fp32": mx.float32, "bf16": mx.bfloat16}.get(precision, mx.float16))
    if precision.endswith("bit"):
        from mlx_lm.utils import quantize_model

        group = 32 if engine.target.hidden_size % 64 else 64
        model, _ = quantize_model(model, {}, group_size=group, bits=int(precision[0]))
    return redrafter_mlx.wrap(model, tokenizer, name=engine.target.name, drafter=args.drafter, shape="1x1")


def measure(engine: Any, prompts: list[Any], tokens: int) -> tuple[float, float, list[list[int]]]:
    """tokens/s, tokens/step and the texts, all of the same length."""
    engine.generate(prompts[0], max_new_tokens=4)
    done = [engine.generate(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]
    gained = sum(c.stats.tokens - 1 for c in done)
    seconds = sum(c.stats.seconds - c.stats.prompt_seconds for c in done)
    return gained / seconds, gained / sum(c.stats.steps for c in done), [c.tokens for c in done]


def run(args: argparse.Namespace) -> None:
    if args.tokens < 2 or min(args.widths) < 1 or min(args.lengths) < 1:
        raise ConfigError("bench needs 2 tokens or more, and widths and lengths of 1 or more")
    rows = []
    for precision in args.precisions:
        engine = load(args, precision)
        prompts = [as_prompt(engine, text, raw=False) for text in PROMPTS]
        plain, _, texts = measure(engine.plain(), prompts, args.tokens)
        for width in args.widths:
            for length in args.lengths:
                engine.shape = Shape(width=width, length=length)
                speed, per_step, found = measure(engine, prompts, args.tokens)
                row = {"precision": precision, "width": width, "length": length, "plain_tokens_per_second": plain}
                row |= {"tokens_per_second": speed, "speedup": speed / plain, "tokens_per_step": per_step}
                equal = sum(a == b for a, b in zip(texts, found, strict=True))
                rows.append(row | {"texts": len(texts), "equal": equal})
                print(f"{precision} {width}x{length}: {speed:.1f} tokens/s, {speed / plain:.2f}x plain", flush=True)
        engine.close()
    args.out.write_text(json.dumps({"machine": dict(machine()), "model": args.model, "rows": rows}, indent=1) + "\n")
    print(f"results in {args.out}")
