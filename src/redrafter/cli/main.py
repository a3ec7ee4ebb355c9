"""Entry point: finds the verb, turns errors the user can mend into one line and exit code 2."""

import argparse
import logging
import os
import sys
from importlib import import_module

from redrafter.errors import RedrafterError
from redrafter.version import __version__

DESCRIPTION = "Large language models write faster, without changing a single token of what they write."
VERBS = {
    "generate": "write a continuation of a prompt",
    "chat": "talk with the model",
    "compare": "watch plain and speculative decoding write the same text",
    "serve": "answer OpenAI clients over HTTP, with a page that shows the drafter at work",
    "transcribe": "write down what is said in recordings",
    "train": "make a drafter for a model, with data of one's own or none at all",
    "distill": "make training data for a drafter: the target's own answers",
    "tune": "find the fastest shape for this machine, once",
    "eval": "say how well a drafter guesses, over shapes, temperatures and categories",
    "bench": "compare drafters and other engines fairly, and make a page of it",
    "export": "write a drafter in another project's format",
    "doctor": "say what is installed, what is missing, what this machine will run",
}


def parser(asked: str | None) -> argparse.ArgumentParser:
    """Only the verb that is asked for is imported: torch and transformers take seconds."""
    top = argparse.ArgumentParser(prog="redrafter", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"redrafter {__version__}")
    top.add_argument("--verbose", action="store_true", help="log what happens, and full tracebacks of errors")
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
    _share_cores()
    asked = next((word for word in argv if not word.startswith("-")), None)
    try:
        args = parser(asked).parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("redrafter").setLevel(logging.DEBUG if args.verbose else logging.INFO)
        _quiet_transformers()
        import_module(f"redrafter.cli.{args.verb}").run(args)
    except RedrafterError as error:
        if "--verbose" in argv:
            raise
        print(f"redrafter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nredrafter: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def _share_cores() -> None:
    """Threads that wait for one another spin for a moment, then sleep. Read when torch is first imported.

    By default they spin on; where another program wants a core too, that costs a pass many times what it saves.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _quiet_transformers() -> None:
    """Their progress bars and retries say nothing a user of ours can act on; errors reach us as exceptions."""
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main())
