"""Entry point: runs the command and turns each error that a user can fix into one line and exit code 2."""

import argparse
import logging
import os
import sys
from importlib import import_module
from typing import NoReturn

from redrafter_mlx.errors import ConfigError, RedrafterError
from redrafter_mlx.version import __version__

DESCRIPTION = "Models of mlx-lm write faster, without changing a single token of what they write."
VERBS = {
    "generate": "write a continuation of a prompt",
    "chat": "talk with the model",
    "compare": "write the same texts plainly and speculatively, and compare them",
    "tune": "find the fastest shape for this machine, once",
    "bench": "measure beam widths, lengths and precisions, and write a results file",
    "serve": "answer OpenAI clients over HTTP, one request at a time",
    "doctor": "show what is installed, what is missing and what this machine will run",
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as every other error: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parser(asked: str | None) -> Parser:
    """Only the command that is asked for is imported, and none imports mlx before it runs."""
    top = Parser(prog="redrafter-mlx", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"redrafter-mlx {__version__}")
    top.add_argument("--verbose", action="store_true", help="log more, and show full tracebacks of errors")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            import_module(f"redrafter_mlx.cli.{name}").add(verb)
    return top


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),  # what the libraries print tells a user nothing to act on
        ("HF_HUB_VERBOSITY", "critical"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
    asked = next((word for word in argv if not word.startswith("-")), None)
    try:
        args = parser(asked).parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("redrafter_mlx").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        import_module(f"redrafter_mlx.cli.{args.verb}").run(args)
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
