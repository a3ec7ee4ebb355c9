"""Collect rows of several results files, or selected rows of one, in a new results file.

    python benchmarks/gather.py a.json b.json --save peers.json
    python benchmarks/gather.py benchmarks/results/drafter_smollm2.json --only variant "all of it" "no RNN" \\
        --headline variant "16x5:63, T=0" --save benchmarks/results/rnn.json

Nothing is measured. The new file names the commands, commit, versions and hardware that measured its rows, and under
`gathered` the files that the rows come from. Rows with different commits, versions or hardware are refused.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/gather.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.common import bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.results import check_new, write_results

SAME = ("commit", "versions", "hardware")
FACTS = ("command", *SAME, "date")


def facts_of(row: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return which run measured a row: the row's own facts if it was gathered before, else those of its file."""
    return {name: (row if "command" in row else result)[name] for name in FACTS}


def merge_facts(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all rows; exit if they differ in commit, versions or hardware.

    >>> one = {"command": "a", "commit": "c", "versions": {}, "hardware": {}, "date": "1"}
    >>> merge_facts([one, one | {"command": "b", "date": "2"}])["command"]
    'a; b'
    """
    for name in SAME:
        values = [f[name] for f in facts]
        if any(v != values[0] for v in values):
            other = next(v for v in values if v != values[0])
            sys.exit(f"rows of different {name} cannot share a file: {values[0]} and {other}")
    commands = "; ".join(dict.fromkeys(f["command"] for f in facts))
    return facts[0] | {"command": commands, "date": max(f["date"] for f in facts)}


def smoke(tiny: TinyFiles) -> list[object]:
    folder = tiny.new_folder()
    for name in ("a", "b"):
        write_results(folder / f"{name}.json", {name: 1.0}, [{"name": name}], tiny.facts)
    return [folder / "a.json", folder / "b.json", "--save", folder / "gathered.json"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--only", nargs="+", metavar=("KEY", "VALUE"), help="take only rows whose KEY has one of these values"
    )
    parser.add_argument(
        "--headline",
        nargs=2,
        metavar=("KEY", "KEY"),
        help="make the headline from these two keys of each row: name and number",
    )
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    for path in args.files:
        result = json.loads(path.read_text())
        chosen = [r for r in result["rows"] if args.only is None or str(r.get(args.only[0])) in args.only[1:]]
        facts += [facts_of(r, result) for r in chosen]
        rows += chosen
        if args.only is None:
            headline |= result["headline"]
    if args.only is not None:
        missing = set(args.only[1:]) - {str(r[args.only[0]]) for r in rows}
        if missing:
            sys.exit(f"no row has {args.only[0]} {', '.join(sorted(missing))}")
    if not rows:
        sys.exit(f"no rows in {', '.join(map(str, args.files))}")
    if args.headline:
        headline = {str(r[args.headline[0]]): r[args.headline[1]] for r in rows}
    write_results(args.save, headline, rows, merge_facts(facts) | {"gathered": [p.name for p in args.files]})


if __name__ == "__main__":
    main()
