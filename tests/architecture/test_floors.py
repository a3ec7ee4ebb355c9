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


def calls(path: Path, names: set[str], kind: type[ast.expr]) -> list[str]:
    """Where a file calls any of these, as bare names (ast.Name) or as methods (ast.Attribute)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, kind):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in names:
                found.append(f"{path.name} {name}")
    return found


def waits(path: Path) -> list[str]:
    """Calls that read a tensor's value: methods, and Python's own conversions."""
    methods = {"item", "tolist", "nonzero", "cpu", "numpy", "masked_select"}
    return calls(path, methods, ast.Attribute) + calls(path, {"int", "float", "bool"}, ast.Name)


def test_the_core_never_waits_for_the_host():
    networks = [p for p in (SOURCE / "drafters").glob("*/*.py") if p.name in ("network.py", "memory.py")]
    assert len(networks) >= 4
    found = [c for path in (*(SOURCE / "core").glob("*.py"), *networks) for c in waits(path)]
    assert found == ["noise.py int"], "only fold(), which makes seeds before any step"


def test_the_core_never_waits_for_the_host_twin(tmp_path):
    (tmp_path / "bad.py").write_text("x.sum().item()\nint(x)\nx.int()\n")
    assert waits(tmp_path / "bad.py") == ["bad.py item", "bad.py int"]


def test_only_the_command_line_prints():
    found = [c for path in FILES if path.parent.name != "cli" for c in calls(path, {"print"}, ast.Name)]
    assert found == []
