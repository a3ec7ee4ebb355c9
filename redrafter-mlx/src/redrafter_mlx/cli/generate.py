"""`redrafter-mlx generate`: write a continuation of a prompt."""

import argparse
import sys

from redrafter_mlx.cli.options import add_model, add_text, as_prompt, open_engine, text_options
from redrafter_mlx.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    parser.add_argument("--stats", action="store_true", help="print tokens/s and tokens/step behind the text")
    add_model(parser)
    add_text(parser)


def run(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text:
        raise ConfigError("the prompt is empty")
    engine = open_engine(args)
    stats = None
    for part in engine.stream(as_prompt(engine, text, args.raw), **text_options(args)):
        print(part.text, end="", flush=True)
        stats = part.stats
    print()
    if args.stats and stats is not None:
        print(
            f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens/step "
            f"({engine.drafter.name}, {engine.shape.label})",
            file=sys.stderr,
        )
