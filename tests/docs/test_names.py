"""The files, options and environment variables that the documentation names exist."""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from redrafter.cli.main import VERBS, parser

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "redrafter"
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(PACKAGE.rglob("README.md")),
]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@cache
def file_endings() -> set[str]:
    """The path of every file and folder, whole and without its first folders."""
    places = [ROOT / name for name in ("src", "tests", "benchmarks", "docs", "examples", "redrafter-mlx")]
    paths = [*places, *ROOT.glob("*.*"), *(path for place in places for path in place.rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in paths]
    return {"/".join(names[i:]) for names in parts for i in range(len(names))}


def unknown_files(text: str) -> list[str]:
    """Files of the source code, and paths that begin with one of its folders, that do not exist."""
    folders = {path.name for place in (ROOT, PACKAGE) for path in place.iterdir() if path.is_dir()}
    words = [word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"(?<![\w/])[\w./<>*-]+", span)]
    named = [word.rstrip("/") for word in words if "<" not in word and "*" not in word]
    ours = [word for word in named if re.search(r"\.(py|cpp|h)$", word) or word.partition("/")[0] in folders]
    return [word for word in ours if word not in file_endings() and not word.endswith("results/NAME")]


@cache
def known_options(verb: str) -> set[str]:
    """The options of a command and of its own commands (`bench run`)."""

    def options(found: argparse.ArgumentParser) -> Iterator[str]:
        for action in found._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    if name == verb or found.prog != "redrafter":
                        yield from options(inner)

    return set(options(parser(verb)))


def unknown_options(text: str) -> list[str]:
    """Options in command lines of `redrafter` and of the benchmarks' scripts that these do not have."""
    text, unknown = text.replace("\\\n", " "), []
    for verb, rest in re.findall(r"\bredrafter ([a-z]+)([^`#;|\n]*)", text):
        if verb in VERBS:
            unknown += [f"{verb} {name}" for name in OPTION.findall(rest) if name not in known_options(verb)]
    for script, rest in re.findall(r"\b(benchmarks/\w+\.py)([^`#;|\n]*)", text):
        known = (ROOT / script).read_text() + (ROOT / "benchmarks" / "common.py").read_text()
        unknown += [f"{script} {name}" for name in OPTION.findall(rest) if f'"{name}"' not in known]
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_options_exist(page: Path) -> None:
    assert unknown_files(page.read_text()) == []
    assert unknown_options(page.read_text()) == []


def test_options_without_a_command_exist() -> None:
    """Pages that speak of no other program name only our own options."""
    known = set().union(*(known_options(verb) for verb in VERBS))
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    ours = ("README", "docs/serve", "docs/train", "docs/training-options", "docs/tune", "docs/cpu", "docs/exactness")
    for page in (ROOT / f"{name}.md" for name in ours):
        spans = re.findall(r"`(--[a-z][\w-]*)", page.read_text())
        assert [name for name in spans if name not in known and f'"{name}"' not in scripts] == []


def test_environment_variables_exist() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for page in PAGES:
        assert [name for name in re.findall(r"\bREDRAFTER_[A-Z]+\b", page.read_text()) if name not in code] == []


def test_wrong_names_are_noticed() -> None:
    assert unknown_files("`core/step.py`, `step.py`, `drafters/medusa/` and `tests/drafters/<kind>/`") == []
    wrong = "`core/steps.py`, `stepping.py` and `drafters/ngram`"
    assert unknown_files(wrong) == ["core/steps.py", "stepping.py", "drafters/ngram"]
    assert unknown_options("`redrafter bench run --suite mt_bench`\nredrafter tune --quick \\\n    --batch 4") == []
    wrong = "redrafter tune --quick \\\n    --fast 4  # --slow\n`python benchmarks/packing.py --overwrite --wide`"
    assert unknown_options(wrong) == ["tune --fast", "benchmarks/packing.py --wide"]
