"""`redrafter-mlx tune`: measure shapes on this machine, plain decoding included, and keep the fastest."""

import argparse

from redrafter_mlx.cli.bench import measure
from redrafter_mlx.cli.options import PROMPTS, add_model, as_prompt, open_engine
from redrafter_mlx.config import Shape
from redrafter_mlx.errors import ConfigError

SHAPES = ("1x1", "1x2", "1x3", "1x4", "2x2:3", "2x3:4", "2x4:6", "3x3:5", "3x4:8", "4x4:8")
"""Small trees: on Apple silicon each verified token costs, and matrix kernels change at few rows."""


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape=False)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="shapes to measure")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each text (48)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"texts for each shape ({len(PROMPTS)})")


def run(args: argparse.Namespace) -> None:
    shapes = [Shape.of(text) for text in args.shapes]
    if not 1 <= args.prompts <= len(PROMPTS) or args.tokens < 2:
        raise ConfigError(f"tune needs 1 to {len(PROMPTS)} prompts and 2 tokens or more")
    args.shape = shapes[0].label  # not what an earlier tune found
    engine = open_engine(args)
    from redrafter_mlx import profiles

    if not engine.drafter.layers:
        raise ConfigError(f"there is nothing to tune: the drafter of {engine.target.name} is {engine.drafter.name}")
    prompts = [as_prompt(engine, text, raw=False) for text in PROMPTS[: args.prompts]]
    measured: dict[str, float] = {}
    for shape in [None, *shapes]:
        label = "plain" if shape is None else shape.label
        engine.shape = shape or engine.shape
        measured[label], per_step, _ = measure(engine if shape else engine.plain(), prompts, args.tokens)
        print(f"{label:>8}  {measured[label]:8.1f} tokens/s  {per_step:.2f} tokens/step", flush=True)
    best = max(measured, key=lambda name: measured[name])
    profile = {"shape": None if best == "plain" else best, "tokens_per_second": measured}
    where = profiles.save(engine.target, engine.drafter.name, profile)
    print(f"fastest: {best}, {measured[best] / measured['plain']:.2f}x plain decoding; kept in {where}")
