"""`redrafter bench`: comparisons. Each subcommand has its own module."""

import argparse
from importlib import import_module

VERBS = {
    "run": (
        "redrafter.cli.bench_run",
        "let contenders answer the same questions in turns; compare their speed and texts",
    ),
    "report": ("redrafter.cli.bench_report", "write a page and Markdown tables from one or several runs"),
    "sampling": (
        "redrafter.cli.bench_sampling",
        "compare ways to verify drafted tokens by rejection sampling: time, acceptance, text quality",
    ),
    "serve": (
        "redrafter.cli.bench_serve",
        "load-test a running server: speculative against plain decoding, from one request at a time to many",
    ),
}
"""Name -> (module with `add(parser)`, `run(args)` and `EPILOG`, description)."""

EPILOG = """examples:
  redrafter bench run --suite mt_bench --quick --out quick
  redrafter bench report quick --out quick.html
  redrafter bench sampling summaries --data benchmarks/data/cnn_dm.jsonl --drafter my-draft-model
  redrafter bench serve --url http://127.0.0.1:8000"""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="bench_verb", required=True, metavar="WHAT")
    for name, (module, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        found = import_module(module)
        verb.epilog = found.EPILOG
        verb.formatter_class = argparse.RawDescriptionHelpFormatter
        found.add(verb)


def run(args: argparse.Namespace) -> None:
    import_module(VERBS[args.bench_verb][0]).run(args)
