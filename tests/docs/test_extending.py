"""The examples of docs/extending.md run as written, and notice when they are wrong."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import redrafter
from redrafter.config import RULES

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SOURCE = Path(redrafter.__file__).parents[1]
SECTIONS = {s.partition("\n")[0]: s for s in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]}


@pytest.fixture
def run_section(tmp_path, monkeypatch):
    """Run a section's Python blocks in order: a block that begins with a path becomes a module of the package."""
    before = set(sys.modules)
    monkeypatch.delitem(RULES, "first", raising=False)

    def run(title, change=lambda code: code):
        names = {}
        blocks = re.findall(r"```python\n(.*?)```", SECTIONS[title], flags=re.DOTALL)
        assert blocks
        for block in map(change, blocks):
            path = re.match(r"# src/(redrafter/\S+\.py)\n", block)
            if path is None:
                exec(compile(block, f"{PAGE}: {title}", "exec"), names)
                continue
            file = tmp_path / path[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
            for folder in file.relative_to(tmp_path).parents:
                if (SOURCE / folder / "__init__.py").exists():  # a package that the example adds a module to
                    package = importlib.import_module(".".join(folder.parts))
                    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / folder)])
            importlib.invalidate_caches()
        return names

    yield run
    for name in sorted(set(sys.modules) - before, reverse=True):  # children before their packages
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            parent, _, child = name.rpartition(".")
            vars(sys.modules[parent]).pop(child, None)
            del sys.modules[name]
    RULES.pop("first", None)


def test_acceptance_rule(run_section):
    run_section("Add an acceptance rule")


def test_twin_a_rule_that_accepts_any_draft_fails(run_section):
    def lossy(code):
        return code.replace("(tree.tokens == choice.gather(1, tree.parents)) & ", "")

    with pytest.raises(AssertionError):
        run_section("Add an acceptance rule", lossy)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel(run_section):
    pytest.importorskip("triton", reason="triton is not installed")
    run_section("Add a kernel")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_twin_a_kernel_without_its_maximum_fails(run_section):
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(AssertionError):
        run_section("Add a kernel", lambda code: code.replace("tl.maximum(tl.load", "tl.minimum(tl.load"))


def test_model_family(run_section):
    run_section("Add a model family")
