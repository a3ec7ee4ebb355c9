"""What redrafter_mlx may import, how long a file may be, and which files may print."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "redrafter_mlx"
FILES = sorted(SOURCE.rglob("*.py"))
LAYERS = [
    ("errors", "version"),
    ("config",),
    ("completion", "noise", "tree", "server"),
    ("accept", "beam", "cache", "network"),
    ("ngram", "checkpoint"),
    ("drafter", "target"),
    ("selfcheck", "decode", "profiles"),
    ("api",),
]
"""Lowest first. A file imports only files below it; `cli` imports any of them."""


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_has_one_duty_and_needs_no_torch(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "every file says what it is for"
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"torch", "redrafter", "transformers", "benchmarks", "tests"}
    if path.parent.name != "cli":
        assert "print(" not in text


def test_a_file_imports_only_files_below_it():
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    top = [path for path in FILES if path.parent == SOURCE and path.stem != "__init__"]
    assert {path.stem for path in top} == set(rank)
    for path in top:
        own = {name.split(".")[1] for name in imported(path) if name.startswith("redrafter_mlx.")}
        assert all(rank[name] < rank[path.stem] for name in own), f"{path.name} imports {own}"
