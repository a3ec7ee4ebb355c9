"""Fill the tables of README, docs and the drafter's card, and draw the plots: python benchmarks/readme.py [--check].

A page marks the place of a table with <!-- name --> and <!-- /name -->; benchmarks/tables knows the names.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/readme.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
import re
from typing import Any

from benchmarks.tables import BLOCKS, MAPS
from redrafter.bench.plot import plot_loads

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/benchmarks.md",
    ROOT / "docs/drafters.md",
    ROOT / "docs/engines.md",
    ROOT / "docs/choose-a-drafter.md",
    ROOT / "docs/sglang.md",
    ROOT / "docs/vllm.md",
    ROOT / "docs/models.md",
    ROOT / "docs/mlx.md",
    ROOT / "docs/quantised.md",
    ROOT / "src/redrafter/drafters/shipped/SmolLM2-135M-Instruct/README.md",
]
PLOTS = ("serve_cpu", "serve_gpu")


def source(result: dict[str, Any]) -> str:
    """The line under a table: the command, the machine and the commit that measured it, and the results file's note."""
    hardware = result["hardware"]
    threads = f"{hardware.get('threads')} thread{'s' * (hardware.get('threads') != 1)}"
    machine = hardware.get("gpu") or f"{hardware.get('cpu') or hardware['machine']}, {threads}"
    line = f"`{result['command']}`; {machine}; torch {result['versions']['torch']}; commit {result['commit']}"
    return f"{line}. Note: {result['note']}" if "note" in result else line


def block(name: str) -> str:
    """The Markdown of one table."""
    files, table = BLOCKS[name]
    results = [json.loads((RESULTS / file).read_text()) for file in files]
    text = table(*results)
    if name in MAPS:
        return text
    lines = []
    for result in results:
        # Rows that another run measured carry that run's command, or the run itself.
        rows = [r.get("run", r) for r in result["rows"] if name in (r.get("kind"), r.get("part"))]
        measured = next((r for r in rows if "command" in r), result)
        machine = {key: result[key] for key in ("hardware", "versions")}
        lines.append(f"<sub>{source(machine | measured)}</sub>")
    return text + "\n\n" + "\n\n".join(lines)


def filled(page: Path) -> str:
    """The page with every table made anew."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name not in BLOCKS:
            sys.exit(f"{page}: no table is named {name}")
        return f"<!-- {name} -->\n{block(name)}\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", fill, page.read_text(), flags=re.DOTALL)


def drawn(name: str) -> str:
    """A plot of the time per token over the load, made anew."""
    rows = [r for r in json.loads((RESULTS / f"{name}.json").read_text())["rows"] if "concurrency" in r]
    return plot_loads(rows[0]["target"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    args = parser.parse_args()
    texts = {page: filled(page) for page in PAGES} | {RESULTS / f"{name}.svg": drawn(name) for name in PLOTS}
    for page, text in texts.items():
        if not args.check:
            page.write_text(text)
        elif text != page.read_text():
            sys.exit(f"{page.name} does not match benchmarks/results: run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
