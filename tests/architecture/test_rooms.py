"""The rooms of ARCHITECTURE.md: which room may import which, what each file says of itself, which room may print."""

import ast
from pathlib import Path

import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "redrafter"
FILES = sorted(SOURCE.rglob("*.py"))


def test_a_room_imports_only_rooms_below_it():
    configure()
    assert use_cases.lint_imports(config_filename=str(ROOT / "pyproject.toml"), is_debug_mode=False)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


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


def never_waiting(source: Path) -> list[Path]:
    """The files whose code runs inside a step: the core with its rules, and the drafters' networks."""
    networks = (p for p in source.glob("drafters/*/*.py") if p.name in ("network.py", "memory.py"))
    return [*sorted(source.glob("core/**/*.py")), *sorted(networks)]


def test_the_core_never_waits_for_the_host():
    files = never_waiting(SOURCE)
    assert SOURCE / "core" / "rules" / "seeded.py" in files
    assert sum(path.name in ("network.py", "memory.py") for path in files) >= 4
    found = [c for path in files for c in waits(path)]
    assert found == ["noise.py int"], "only fold(), which makes seeds before any step"


def test_the_core_never_waits_for_the_host_twin(tmp_path):
    bad = tmp_path / "core" / "rules" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("x.sum().item()\nint(x)\nx.int()\n")
    assert never_waiting(tmp_path) == [bad]
    assert waits(bad) == ["bad.py item", "bad.py int"]


def test_only_the_command_line_prints():
    found = [c for path in FILES if path.parent.name != "cli" for c in calls(path, {"print"}, ast.Name)]
    assert found == []
