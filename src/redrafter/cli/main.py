"""Entry point: finds the verb, turns errors the user can mend into one line and exit code 2."""

import argparse
import logging
import os
import sys
from types import ModuleType

from redrafter.errors import RedrafterError
from redrafter.version import __version__

DESCRIPTION = "Large language models write faster, without changing a single token of what they write."


def parser(verbs: dict[str, ModuleType]) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="redrafter", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"redrafter {__version__}")
    top.add_argument("--verbose", action="store_true", help="log what happens, and full tracebacks of errors")
    commands = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in verbs.items():
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add(sub)
    return top


def main(argv: list[str] | None = None) -> int:
    # Imported here so that a missing or broken torch is reported, not a traceback of our own making.
    from redrafter.cli import chat, compare, doctor, generate

    verbs = {"generate": generate, "chat": chat, "compare": compare, "doctor": doctor}
    args = parser(verbs).parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("redrafter").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    _quiet_transformers()
    try:
        verbs[args.verb].run(args)
    except RedrafterError as error:
        if args.verbose:
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


def _quiet_transformers() -> None:
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
