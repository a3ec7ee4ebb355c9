"""`redrafter bench report`: writes a page and Markdown tables from runs."""

import argparse
import json
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from redrafter.bench.specs import REFERENCE
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.paths import InputFile, InputFolder, OutputFile
from redrafter.errors import ConfigError
from redrafter.page import write_page
from redrafter.results import check_new, write_results

EPILOG = """examples:
  redrafter bench report quick
  redrafter bench report mt alpaca --out table1.html --markdown table1.md --results benchmarks/results/packing.json"""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser, "runs", tuple[InputFolder, ...], metavar="FOLDER", help="a folder that `redrafter bench run` wrote"
    )
    add_value(parser, "--out", OutputFile, help="the page (default: report.html in the first folder)")
    add_value(parser, "--markdown", OutputFile, help="the tables (default: tables.md beside the page)")
    add_value(parser, "--save", OutputFile, metavar="JSON", help="write the figures as a results JSON too")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace a file")
    add_value(
        parser,
        "--results",
        tuple[InputFile, ...],
        default=[],
        metavar="JSON",
        help="results of scripts in benchmarks/ to plot too: gpu.py (part batch), packing.py, peers.py, rules.py",
    )


def run(args: argparse.Namespace) -> None:
    from redrafter.bench.report import markdown, page
    from redrafter.bench.runs import read_answers, read_facts
    from redrafter.bench.statistics import headline, summaries

    if args.save:
        check_new(args.save, args.overwrite)
    runs = [(read_facts(folder), read_answers(folder)) for folder in args.runs]
    records = [r for _, found in runs for r in found]
    if not records:
        raise ConfigError(f"{args.runs[0]} holds no answers yet")
    others = []
    for path in args.results:
        try:
            others.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the results {path}: {error}") from error
    out = args.out or args.runs[0] / "report.html"
    write_page(out, page(runs, others))
    rows = summaries(records, REFERENCE)
    tables = args.markdown or out.with_name("tables.md")
    write_page(tables, markdown(rows))
    if args.save:
        if any(facts["environment"] != runs[0][0]["environment"] for facts, _ in runs):
            raise ConfigError("these runs are of different code or machines: save them in separate results files")
        whole = summaries(records, REFERENCE, by_category=True)
        made = [{"part": "run", "hash": f["hash"], "command": f.get("command")} | f["environment"] for f, _ in runs]
        write_results(args.save, headline(whole, REFERENCE), made + whole)
    console = Console()
    for table in console_table(rows):
        console.print(table)
    console.note(f"page: {out}   tables: {tables}")


def console_table(rows: list[dict[str, Any]]) -> list[Table]:
    """One table for each setting."""
    from redrafter.bench.report import COLUMNS, cells, title
    from redrafter.bench.statistics import settings

    made = []
    for setting in settings(rows):
        table = Table(title=title(setting), title_justify="left", box=SIMPLE)
        for number, name in enumerate(COLUMNS):
            table.add_column(name, no_wrap=number == 0, overflow="fold")
        for r in rows:
            if (r["suite"], r["temperature"], r["batch"]) == setting and r["category"] == "all":
                table.add_row(*cells(r))
        made.append(table)
    return made
