"""README and docs are true: their tables equal the results, their commands and links exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import redrafter
from benchmarks import readme
from redrafter.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def quoted_figures() -> dict[str, list[str]]:
    """Figures of results files that pages give in sentences, outside the tables."""
    names = ("gpu_7b", "sglang_gpu", "serve_gpu", "training_h200")
    results = {name: json.loads((readme.RESULTS / f"{name}.json").read_text()) for name in names}
    gpu_7b, sglang = results["gpu_7b"]["rows"], results["sglang_gpu"]["rows"]
    speed = {r["part"]: r for r in gpu_7b if r.get("contender") != "plain"}
    equal = [r["equal"] for r in gpu_7b if r["part"] in ("speed", "tasks", "long") and r["equal"] == r["texts"]]
    smaller = [r for r in sglang if r["part"] == "wide" and r["concurrency"] < 32]
    plain, drafted, texts = (sum(r[key] for r in smaller) for key in ("plain_equal_to_first_level", "equal", "texts"))
    served, minutes = (
        results["serve_gpu"]["headline"],
        f"{results['training_h200']['headline']['minutes_to_train']:.0f}",
    )
    times = [f"{speed['speed'][key]:.2f}" for key in ("plain_ms", "step_ms")]
    return {
        "docs/decisions/6-recorded-steps.md": [
            f"{speed['profile']['kernels']:.0f}",
            f"{speed['speed']['step_ms']:.1f} ms",
        ],
        "docs/decisions/9-exactness.md": [str(sum(equal)), *times],
        "docs/sglang.md": [f"{plain} of {texts}", str(drafted)],
        "docs/faq.md": [f"{served['ratio_at_1']:.2f}×", f"{served['ratio_at_32']:.2f}×", f"{minutes} minutes"],
        "docs/train.md": [f"{minutes} minutes"],
    }


def missing_figures(text: str, figures: list[str]) -> list[str]:
    return [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d|\d)", text)]


@pytest.mark.parametrize(("page", "figures"), quoted_figures().items())
def test_prose_quotes_the_results(page, figures):
    assert missing_figures((ROOT / page).read_text(), figures) == []


def test_another_figure_is_noticed():
    assert missing_figures("takes 14 minutes, 1.26× and 367 kernels.", ["14 minutes", "1.26×", "367"]) == []
    assert missing_figures("takes 114 minutes, 11.26× and 3671", ["14 minutes", "1.26×", "367"]) != []


def test_every_table_is_on_a_page():
    shown = [name for page in readme.PAGES for name in re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE)]
    assert set(shown) == set(readme.BLOCKS)


def test_every_results_file_is_shown():
    """A results file is rendered in a table or linked from a page; anything else is history, which git keeps."""
    shown = {file for files, _ in readme.BLOCKS.values() for file in files}
    for page in PAGES:
        shown |= {Path(target).name for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())}
    assert [p.name for p in sorted((ROOT / "benchmarks" / "results").iterdir()) if p.name not in shown] == []


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


def unknown_commands(text: str) -> list[str]:
    """Lines of a page that begin with a command of redrafter, or a target of make, that does not exist."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    known = {"redrafter": set(VERBS), "make": targets}
    lines = re.findall(r"^(redrafter|make) ([a-z][\w-]*)", text, flags=re.MULTILINE)
    return [f"{program} {name}" for program, name in lines if name not in known[program]]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page):
    assert unknown_commands("\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL))) == []


def test_unknown_commands_are_noticed():
    assert unknown_commands("make demo\nmake tea\nredrafter chat\nredrafter sing") == ["make tea", "redrafter sing"]


def examples(page: str) -> list[str]:
    """The Python blocks of a page, with few tokens."""
    text = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", (ROOT / page).read_text())
    return [b.replace('"path/or/id", ', "") for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]


def test_python_examples_run():
    """The snippets of the README and of the pages about Python, with the default model and fewer tokens."""
    names = {"redrafter": redrafter}
    for block in examples("README.md") + examples("docs/python.md"):
        exec(block, names)
        if "model" not in names:
            assert names["done"].text
            names |= {"model": names["llm"].target.model, "tokenizer": names["llm"].target.tokenizer}
            names["inputs"] = names["tokenizer"]("Once upon a time", return_tensors="pt")


@pytest.mark.parametrize("page", ["quickstart", "choose-a-drafter"])
def test_first_example_runs(page, capsys):
    exec(examples(f"docs/{page}.md")[0], {})
    assert capsys.readouterr().out.strip()


def test_troubleshooting_quotes_messages_of_the_code():
    """The texts of the first column, in which `...` stands for anything, are written by the code."""
    assert unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text()) == []
    assert unknown_messages("| `no space left in` | x |\n| `no ... left in spice` | x |") == ["left in spice"]


def unknown_messages(text: str) -> list[str]:
    code = "".join(path.read_text() for path in sorted((ROOT / "src" / "redrafter").rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message that is written over several lines
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    quoted = [part.strip() for cell in cells for words in re.findall(r"`([^`]+)`", cell) for part in words.split("...")]
    return [part for part in quoted if part not in code]
