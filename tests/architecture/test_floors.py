"""The house keeps its floors: who may import whom, how large a room may be, who may print."""

import ast
from pathlib import Path

import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "redrafter"
FILES = sorted(SOURCE.rglob("*.py"))


def test_a_floor_imports_only_the_floors_below_it():
    configure()
    assert use_cases.lint_imports(config_filename=str(ROOT / "pyproject.toml"), is_debug_mode=False)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_has_one_duty(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "every file says what it is for"


def calls(path: Path, names: set[str]) -> list[str]:
    """Where a file calls any of these, by bare name or as a method."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in names:
                found.append(f"{path.name}:{node.lineno} {name}")
    return found


def test_the_core_never_waits_for_the_host():
    waiting = {"item", "tolist", "nonzero", "cpu", "numpy", "masked_select"}
    found = [c for path in (SOURCE / "core").glob("*.py") for c in calls(path, waiting)]
    assert found == []


def test_the_core_never_waits_for_the_host_twin(tmp_path):
    (tmp_path / "bad.py").write_text("x.sum().item()\n")
    assert calls(tmp_path / "bad.py", {"item"}) == ["bad.py:1 item"]


def test_only_the_command_line_prints():
    found = [c for path in FILES if path.parent.name != "cli" for c in calls(path, {"print"})]
    assert found == []
