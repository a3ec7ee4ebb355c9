"""`redrafter generate`: continues one prompt and prints the text as it is decoded."""

import argparse
import sys

from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import (
    add_grammar,
    add_model,
    add_sampling,
    as_prompt,
    load_engine,
    read_grammar,
    sampling_options,
)
from redrafter.cli.progress import waiting
from redrafter.cli.show import awaited, coloured, figures
from redrafter.errors import ConfigError

EPILOG = """examples:
  redrafter generate "Why is the sky blue?"
  redrafter generate --temperature 0.8 --seed 7 "Write a haiku"
  redrafter generate --json-schema person.json "Invent a person"
  cat article.txt | redrafter generate --max-new-tokens 200 -"""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "prompt", str, help="the prompt, or - to read it from standard input")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
    parser.add_argument("--quiet", action="store_true", help="print the text only, without statistics")
    add_model(parser)
    add_sampling(parser)
    add_grammar(parser)


def run(args: argparse.Namespace) -> None:
    options = sampling_options(args) | {"grammar": read_grammar(args)}
    text = read_prompt() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ConfigError("the prompt is empty")
    out, err = Console(soft_wrap=True), Console(stderr=True)
    with waiting(err, "loading"):
        engine = load_engine(args)
    part = None
    parts = engine.stream([as_prompt(engine, text, args.raw)], **options)
    for part in awaited(parts, engine, err):
        if out.is_terminal:
            out.print(coloured(part, engine.target.tokenizer), end="")
        else:  # a file or a pipe gets the text unchanged, tabs included
            sys.stdout.write(part.text)
            sys.stdout.flush()
    print()
    if part is not None and not args.quiet:
        legend = " (green: drafted)" if out.is_terminal and part.stats.accepted else ""
        err.note(f"{figures(part.stats)}{legend}")


def read_prompt() -> str:
    """Standard input as text."""
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales, Python reads wrong bytes as lone surrogates
        return text
    except UnicodeError:
        raise ConfigError(
            f"the prompt is not {sys.stdin.encoding} text; set PYTHONIOENCODING to its encoding"
        ) from None
