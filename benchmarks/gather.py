"""Rows of results files as a file of their own: what several processes measured together, or one ablation out of many.

    python benchmarks/gather.py a.json b.json --save peers.json
    python benchmarks/gather.py benchmarks/results/drafter_smollm2.json --only variant "all of it" "no RNN" \\
        --headline variant "16x5:63, T=0" --save benchmarks/results/rnn.json

Nothing is measured or changed. The new file says which commands, commit, versions and hardware measured its rows (of
all of them the same, else it is refused), and under `gathered` which files they were taken from.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from redrafter.results import check_new, write_results

SAME = ("commit", "versions", "hardware")
FACTS = ("command", *SAME, "date")


def facts_of(row: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Who measured a row: what it says itself, where it was taken from another run already; else its file."""
    return {name: (row if "command" in row else result)[name] for name in FACTS}


def together(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """One for all rows.

    >>> one = {"command": "a", "commit": "c", "versions": {}, "hardware": {}, "date": "1"}
    >>> together([one, one | {"command": "b", "date": "2"}])["command"]
    'a; b'
    """
    for name in SAME:
        values = [f[name] for f in facts]
        if any(v != values[0] for v in values):
            other = next(v for v in values if v != values[0])
            sys.exit(f"rows of different {name} cannot share a file: {values[0]} and {other}")
    commands = "; ".join(dict.fromkeys(f["command"] for f in facts))
    return facts[0] | {"command": commands, "date": max(f["date"] for f in facts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", metavar=("KEY", "VALUE"), help="rows that have one of these values there")
    parser.add_argument("--headline", nargs=2, metavar=("KEY", "KEY"), help="names and numbers, from the rows")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
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
    write_results(args.save, headline, rows, together(facts) | {"gathered": [p.name for p in args.files]})


if __name__ == "__main__":
    main()
