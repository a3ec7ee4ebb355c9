"""Entry point: runs the command and turns each error that a user can fix into one line and exit code 2."""

import argparse
import contextlib
import errno
import logging
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

from redrafter.errors import ConfigError, RedrafterError, first_line
from redrafter.version import __version__

DESCRIPTION = "Large language models write faster, without changing a single token of what they write."
VERBS = {
    "generate": "write a continuation of a prompt",
    "chat": "talk with the model",
    "compare": "watch plain and speculative decoding write the same text",
    "serve": "answer OpenAI clients over HTTP, with a page that shows the drafter at work",
    "transcribe": "transcribe speech recordings",
    "train": "train a drafter for a model, with or without data of your own",
    "distill": "make training data for a drafter: the target's own answers",
    "tune": "find the fastest shape for this machine, once",
    "eval": "measure how well a drafter guesses, over shapes, temperatures and categories",
    "bench": "compare drafters and other engines, and write a report",
    "export": "write a drafter in another project's format",
    "quantize": "write a model with its weights rounded to 4 bits or to fp8",
    "doctor": "show what is installed, what is missing and what this machine will run",
}
INTERRUPTED, READER_GONE = 128 + 2, 128 + 13
"""Exit codes as a shell gives them for SIGINT and SIGPIPE."""
RESUMABLE = ("train", "distill", "quantize")
EPILOG = """examples:
  redrafter compare
  redrafter generate "Why is the sky blue?"
  redrafter train --model my-model --out my-drafter
  redrafter serve --model my-model --drafter my-drafter

Each command has examples and all its options: redrafter VERB --help"""


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as every other error: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse ignores what cannot be written."""
        (file or sys.stdout).write(message)


def parser(asked: str | None) -> Parser:
    """Only the command that is asked for is imported."""
    top = Parser(
        prog="redrafter",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"redrafter {__version__}")
    top.add_argument("--verbose", action="store_true", help="log more, and show full tracebacks of errors")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            module = import_module(f"redrafter.cli.{name}")
            verb.epilog = module.EPILOG
            verb.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add(verb)
    return top


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    set_environment()
    prepare_streams()
    asked = next((word for word in argv if not word.startswith("-")), None)
    try:
        try:
            run(argv, asked)
        finally:
            sys.stdout.flush()  # here, where an error can be told, and not at the interpreter's end
    except RedrafterError as error:
        if "--verbose" in argv:
            raise
        return fail(str(error))
    except KeyboardInterrupt:
        more = "; to go on from here, give the same command again" if asked in RESUMABLE else ""
        return fail(f"interrupted{more}", INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        return READER_GONE
    except (MemoryError, RuntimeError) as error:
        if "--verbose" in argv or not lacks_memory(error):
            raise
        return fail(f"out of memory: {first_line(error)}; ask for less at once")
    except OSError as error:
        if "--verbose" in argv:
            raise
        discard_output()
        return fail(reason(error))
    return 0


def run(argv: list[str], asked: str | None) -> None:
    args = parser(asked).parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("redrafter").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    if getattr(args, "threads", None) is not None:
        import_module("redrafter.kernels.threads").use_threads(args.threads)
    import_module(f"redrafter.cli.{args.verb}").run(args)


def fail(message: str, code: int = 2) -> int:
    """Say in one line what is wrong, if standard error can still be written."""
    with contextlib.suppress(OSError):
        before = "\n" if code == INTERRUPTED else ""  # after the terminal's ^C
        print(f"{before}redrafter: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def reason(error: OSError) -> str:
    """What the operating system refused: an output, or a file that no command expected to fail.

    >>> reason(IsADirectoryError(21, "Is a directory", "some/folder")), reason(OSError(28, "No space left on device"))
    ('some/folder: Is a directory', 'cannot write: No space left on device')
    """
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return f"cannot write: {error.strerror}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def lacks_memory(error: BaseException) -> bool:
    """Whether this is what torch or numpy say when they cannot allocate.

    >>> [lacks_memory(error) for error in (MemoryError(), RuntimeError("CUDA out of memory"), RuntimeError("shape"))]
    [True, True, False]
    """
    signs = ("out of memory", "allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def discard_output() -> None:
    """If standard output cannot be written, lead it nowhere: the interpreter would fail with the rest at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_environment() -> None:
    """Settings that torch and transformers read when they are first imported. A user's own values are kept."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Waiting threads sleep after a short spin. Spinning on is slow when another program needs the core.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Progress bars and retries of the libraries tell a user nothing to act on; their errors reach us as exceptions.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def prepare_streams() -> None:
    """Streams that are closed lead nowhere. What a stream's encoding lacks is printed as an escape such as \\xe9."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
