"""The command `redrafter-mlx`: its options; each error that a user can fix is one line and exit code 2."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from redrafter_mlx.cli import measure, write
from redrafter_mlx.config import SAMPLING
from redrafter_mlx.errors import ConfigError, RedrafterError
from redrafter_mlx.version import __version__

DESCRIPTION = "Models of mlx-lm write faster, without changing a single token of what they write."
VERBS: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "generate": (write.generate, "write a continuation of a prompt"),
    "chat": (write.chat, "talk with the model"),
    "compare": (write.compare, "write the same texts plainly and speculatively, and compare them"),
    "tune": (measure.tune, "find the fastest shape for this machine, once"),
    "bench": (measure.bench, "measure beam widths, lengths and precisions, and write a results file"),
    "serve": (write.serve, "answer OpenAI clients over HTTP, one request at a time"),
    "doctor": (measure.doctor, "show what is installed, what is missing and what this machine will run"),
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as every other error: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """All options. Nothing imports mlx before a command runs."""
    top = Parser(prog="redrafter-mlx", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"redrafter-mlx {__version__}")
    top.add_argument("--verbose", action="store_true", help="log more, and show full tracebacks of errors")
    commands = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs = {}
    for name, (_, text) in VERBS.items():
        verbs[name] = verb = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        verb.add_argument("--model", required=name != "doctor", help="a folder or Hugging Face id that mlx-lm can load")
        verb.add_argument(
            "--drafter", default="auto", help="auto, recurrent, ngram, none, or a folder (with +ngram behind it)"
        )
        if name not in ("tune", "bench"):
            verb.add_argument("--shape", help="WxL or WxL:N, such as 2x3:4: beam width, length and nodes to verify")
    for name, tokens in (("generate", 256), ("chat", 256), ("compare", 64)):
        add_text(verbs[name], tokens)
    for name in ("generate", "compare"):
        verbs[name].add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")

    verbs["generate"].add_argument("prompt", help="the prompt; - reads it from standard input")
    verbs["generate"].add_argument("--stats", action="store_true", help="print tokens/s and tokens/step after the text")
    verbs["chat"].add_argument("--system", help="a system message")
    verbs["compare"].add_argument("--prompt", action="append", help="a prompt; may be repeated (four of our own)")
    verbs["serve"].add_argument("--host", default="127.0.0.1")
    verbs["serve"].add_argument("--port", type=int, default=8080)
    tune, bench = verbs["tune"], verbs["bench"]
    tune.add_argument("--shapes", nargs="+", default=list(measure.SHAPES), help="shapes to measure")
    tune.add_argument("--tokens", type=int, default=48, help="tokens of each text (48)")
    bench.add_argument("--precisions", nargs="+", choices=measure.PRECISIONS, default=list(measure.PRECISIONS[1:]))
    bench.add_argument("--widths", nargs="+", type=int, default=[1, 2, 3, 4], help="beam widths")
    bench.add_argument("--lengths", nargs="+", type=int, default=[2, 3, 4, 5], help="beam lengths")
    bench.add_argument("--tokens", type=int, default=64, help="tokens of each text (64)")
    bench.add_argument("--out", type=Path, default=Path("redrafter-mlx-bench.json"), help="the results file")
    return top


def add_text(verb: argparse.ArgumentParser, tokens: int) -> None:
    """The options of `Engine.generate`."""
    verb.add_argument("--max-new-tokens", type=int, default=tokens, help=f"at most this many ({tokens})")
    verb.add_argument("--seed", type=int, help="same seed, same text")
    verb.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    for name, default in SAMPLING.items():
        verb.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"({default})")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),  # what the libraries print tells a user nothing to act on
        ("HF_HUB_VERBOSITY", "critical"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
    try:
        args = parser().parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("redrafter_mlx").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        run, _ = VERBS[args.verb]
        run(args)
    except RedrafterError as error:
        if "--verbose" in argv:
            raise
        print(f"redrafter-mlx: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nredrafter-mlx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
