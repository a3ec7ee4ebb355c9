"""The README tells the truth: its figures are those of the results, its commands and links exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from redrafter.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_figures_come_from_results():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gathered_rows_are_those_that_were_measured():
    """A file that benchmarks/gather.py made says of a run what the run's own file says, where that is still here."""
    results = {p.name: json.loads(p.read_text()) for p in (ROOT / "benchmarks" / "results").glob("*.json")}

    def measured(result):
        return [(r.get("date", result["date"]), r) for r in result["rows"]]

    checked = 0
    for name, result in results.items():
        known = [m for source in result.get("gathered", []) for m in measured(results.get(source, {"rows": []}))]
        for date, row in measured(result) if known else []:
            same_run = [r for d, r in known if d == date]
            assert not same_run or row in same_run, f"{name}: {row}"
            checked += bool(same_run)
    assert checked >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_commands_exist():
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^redrafter (\w+)", text, flags=re.MULTILINE))
    assert verbs == set(VERBS)
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def test_python_examples_run():
    """The README's own snippets, on the default model, with fewer tokens."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    first, second = (b.replace("max_new_tokens=64", "max_new_tokens=6") for b in blocks)
    first = first.replace('"path/or/id", ', "")
    names: dict = {}
    exec(first, names)
    assert names["done"].text
    model, tokenizer = names["llm"].target.model, names["llm"].target.tokenizer
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    exec(second, {"model": model, "inputs": inputs})
