"""`tune`, `bench` and `doctor`: the commands that look at this machine."""

import argparse
import json
import platform
from importlib import metadata
from typing import Any

import redrafter_mlx
from redrafter_mlx.cli.write import PROMPTS, as_prompt, open_engine
from redrafter_mlx.config import Shape, require

SHAPES = ("1x1", "1x2", "1x3", "1x4", "2x2:3", "2x3:4", "2x4:6", "3x3:5", "3x4:8", "4x4:8")
"""Small trees: on Apple silicon each verified token costs, and matrix kernels change at few rows."""
PRECISIONS = ("fp32", "fp16", "bf16", "8bit", "4bit")


def measure(engine: Any, tokens: int) -> tuple[float, float, list[list[int]]]:
    """tokens/s, tokens/step and the texts, all of the same length."""
    prompts = [as_prompt(engine, text) for text in PROMPTS]
    engine.generate(prompts[0], max_new_tokens=4)
    done = [engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True) for prompt in prompts]
    gained = sum(c.stats.tokens - 1 for c in done)
    seconds = sum(c.stats.seconds - c.stats.prompt_seconds for c in done)
    return gained / seconds, gained / sum(c.stats.steps for c in done), [c.tokens for c in done]


def tune(args: argparse.Namespace) -> None:
    """Measure shapes, plain decoding included, and keep the fastest."""
    shapes = [Shape.of(text) for text in args.shapes]
    require(args.tokens >= 2, "tune needs 2 tokens or more")
    args.shape = shapes[0].label  # not what an earlier tune found
    engine = open_engine(args)
    nothing = f"there is nothing to tune: the drafter of {engine.target.name} is {engine.drafter.name}"
    require(bool(engine.drafter.layers), nothing)
    measured: dict[str, float] = {}
    for shape in (None, *shapes):
        label = "plain" if shape is None else shape.label
        engine.shape = shape or engine.shape
        each = engine if shape else engine.plain()
        measured[label], per_step, _ = measure(each, args.tokens)
        print(f"{label:>8}  {measured[label]:8.1f} tokens/s  {per_step:.2f} tokens/step", flush=True)
    best = max(measured, key=lambda label: measured[label])
    from redrafter_mlx import profiles

    where = profiles.save(engine.target, engine.drafter.name, {"fastest": best, "tokens_per_second": measured})
    print(f"fastest: {best}, {measured[best] / measured['plain']:.2f}x plain decoding; kept in {where}")


def load_as(precision: str, args: argparse.Namespace) -> Any:
    """The model in this precision, cast or quantised by mlx-lm."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model

    engine, tokenizer = redrafter_mlx.load(args.model, drafter="none")
    engine.close()
    target, model = engine.target, engine.target.model
    require(not target.quantised, f"{args.model} is quantised already: bench needs the model in full precision")
    model.set_dtype({"fp32": mx.float32, "bf16": mx.bfloat16}.get(precision, mx.float16))
    if precision.endswith("bit"):
        group = 32 if target.hidden_size % 64 else 64
        model, _ = quantize_model(model, {}, group_size=group, bits=int(precision[0]))
    return redrafter_mlx.wrap(model, tokenizer, name=target.name, drafter=args.drafter, shape="1x1")


def bench(args: argparse.Namespace) -> None:
    """The papers' on-device table: tokens/s and speedup of beam widths, lengths and precisions."""
    enough = args.tokens >= 2 and min(args.widths + args.lengths) >= 1
    require(enough, "bench needs 2 tokens or more, and widths and lengths of 1 or more")
    rows = []
    for precision in args.precisions:
        engine = load_as(precision, args)
        plain, _, texts = measure(engine.plain(), args.tokens)
        for width in args.widths:
            for length in args.lengths:
                engine.shape = Shape(width=width, length=length)
                speed, per_step, found = measure(engine, args.tokens)
                row = {"precision": precision, "width": width, "length": length, "plain_tokens_per_second": plain}
                row |= {"tokens_per_second": speed, "speedup": speed / plain, "tokens_per_step": per_step}
                equal = sum(a == b for a, b in zip(texts, found, strict=True))
                rows.append(row | {"texts": len(texts), "equal": equal})
                print(f"{precision} {width}x{length}: {speed:.1f} tokens/s, {speed / plain:.2f}x plain", flush=True)
        engine.close()
    args.out.write_text(json.dumps({"machine": machine(), "model": args.model, "rows": rows}, indent=1) + "\n")
    print(f"results in {args.out}")


def doctor(args: argparse.Namespace) -> None:
    for name, text in machine().items():
        print(f"{name:>14}  {text}")
    if args.model is not None:
        engine = open_engine(args)
        target = engine.target
        print(f"{'would run':>14}  {target.name} ({target.kind}) in {target.precision}, {target.layer_count} layers")
        print(f"{'drafter':>14}  {engine.drafter.name}, {engine.shape.label}")
        print(f"{'self-check':>14}  passed: tree nodes get the logits of their paths")


def machine() -> dict[str, str]:
    """What is installed, what is missing, and the device."""
    found = {"redrafter-mlx": f"{redrafter_mlx.__version__}, Python {platform.python_version()}, {platform.platform()}"}
    for name in ("mlx", "mlx-lm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed: pip install mlx-lm, on Linux 'mlx-lm[cpu]' (glibc 2.35 or later)"
    try:
        import mlx.core as mx

        from redrafter_mlx import profiles
    except ImportError as error:
        return found | {"device": f"none: {error}"}
    found["device"] = f"{mx.default_device()}{'' if mx.metal.is_available() else ', Metal is not available'}"
    known = mx.device_info()
    found |= {name: str(known[name]) for name in ("device_name", "architecture", "memory_size") if name in known}
    found["profiles"] = f"{profiles.folder()} (what redrafter-mlx tune finds)"
    return found
