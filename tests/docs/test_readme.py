"""README and docs are true: their tables equal the results, their commands and links exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme
from redrafter.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_tables_equal_the_results():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_changed_result_is_noticed(tmp_path, monkeypatch):
    """The check above can fail: a page filled from other numbers differs."""
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    page = ROOT / "README.md"
    assert readme.filled(page) == page.read_text()
    cpu = json.loads((tmp_path / "cpu.json").read_text())
    cpu["headline"]["vs_own_plain"] += 1
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    assert readme.filled(page) != page.read_text()


@pytest.mark.parametrize("name", readme.PLOTS)
def test_plots_show_the_results(name):
    """A plot that an earlier run left behind differs."""
    assert (readme.RESULTS / f"{name}.svg").read_text() == readme.drawn(name)


def test_a_table_names_the_run_that_measured_it():
    """Rows that were kept from an earlier run carry that run; the line under their table shows it."""
    rows = json.loads((readme.RESULTS / "gpu_7b.json").read_text())["rows"]
    run = next(r["run"] for r in rows if r["part"] == "packing")
    line = readme.block("packing").splitlines()[-1]
    assert run["command"] in line
    assert f"commit {run['commit']}." in line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_figures_lie_in_their_intervals(page):
    """As in `1.09× (1.07 to 1.13)`."""
    figure = r"(\d+\.\d+)[^|.;()\d]{0,40}\((\d+\.\d+)(?: to |–)(\d+\.\d+)[^()]*\)"
    found = [tuple(map(float, values)) for values in re.findall(figure, page.read_text())]
    assert [values for values in found if not values[1] <= values[0] <= values[2]] == []


def test_prose_quotes_the_results():
    """Sentences outside the tables that give figures of a results file."""
    gpu_7b, sglang = (json.loads((readme.RESULTS / f"{n}.json").read_text())["rows"] for n in ("gpu_7b", "sglang_gpu"))
    speed = {r["part"]: r for r in gpu_7b if r.get("contender") != "plain"}
    recorded_steps = (ROOT / "docs/decisions/6-recorded-steps.md").read_text()
    assert f"has {speed['profile']['kernels']:.0f} kernels" in recorded_steps
    assert f"they take {speed['speed']['step_ms']:.1f} ms" in recorded_steps
    exactness = (ROOT / "docs/decisions/9-exactness.md").read_text()
    equal = [r["equal"] for r in gpu_7b if r["part"] in ("speed", "tasks", "long") and r["equal"] == r["texts"]]
    assert f"\n{sum(equal)} in [gpu_7b.json]" in exactness
    for key in ("plain_ms", "step_ms"):
        assert f" {speed['speed'][key]:.2f} " in exactness
    smaller = [r for r in sglang if r["part"] == "wide" and r["concurrency"] < 32]
    plain, drafted, texts = (sum(r[key] for r in smaller) for key in ("plain_equal_to_first_level", "equal", "texts"))
    engines = (ROOT / "docs/engines.md").read_text()
    assert f"({plain} of {texts}, last column)" in engines
    assert f"\n{drafted} of the same {texts} texts" in engines


def test_every_table_is_on_a_page():
    shown = [name for page in readme.PAGES for name in re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE)]
    assert set(shown) == set(readme.BLOCKS)


def test_every_results_file_is_shown():
    """A results file is rendered in a table or linked from a page; anything else is history, which git keeps."""
    shown = {file for files, _ in readme.BLOCKS.values() for file in files}
    for page in PAGES:
        shown |= {Path(target).name for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())}
    assert [p.name for p in sorted((ROOT / "benchmarks" / "results").iterdir()) if p.name not in shown] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_gathered_rows_are_those_that_were_measured():
    """Rows that benchmarks/gather.py copied equal the rows of the file they came from, where that file still exists."""
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


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", prose):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_commands_exist():
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^redrafter (\w+)", text, flags=re.MULTILINE))
    assert verbs == set(VERBS)
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def test_python_examples_run():
    """The README's own snippets, with the default model and fewer tokens."""
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
