"""The wheel: complete, and usable outside the checkout."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from redrafter.kernels.cpu.build import MACHINES
from redrafter.version import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Outside the checkout: PYTHONPATH must not lead back into it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    env |= {"COLUMNS": "400", **variables}  # long paths are not cut
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no older build folder gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    run(sys.executable, "-m", "pip", *build, cwd=out)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; the packages it depends on are those of this environment."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "env", with_pip=False)
    python = home / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    [site] = (home / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_everything_but_notes_is_in_the_wheel(wheel):
    package = ROOT / "src" / "redrafter"
    wanted = {
        str(p.relative_to(ROOT / "src"))
        for p in package.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and (p.suffix != ".md" or "shipped" in p.parts)
    }
    with zipfile.ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if name.startswith("redrafter/")}
    compiled = {name for name in packed if name.endswith(".so")}
    assert packed - compiled == wanted
    assert {Path(name).stem for name in compiled} == set(
        MACHINES.get(platform.machine(), ()) if sys.platform == "linux" else ()
    )
    for suffix in (".safetensors", ".cpp", ".h", ".html", "py.typed"):
        assert any(name.endswith(suffix) for name in packed), suffix


def test_the_command_runs_outside_the_checkout(installed):
    bin_ = installed / "env" / "bin"
    where = run(bin_ / "python", "-c", "import redrafter; print(redrafter.__file__)", cwd=installed)
    assert Path(where.strip()).is_relative_to(installed)
    assert run(bin_ / "redrafter", "--version", cwd=installed) == f"redrafter {__version__}\n"
    told = run(bin_ / "redrafter", "doctor", cwd=installed)
    assert __version__ in told
    assert str(installed) in told.replace("\n", "").replace(" ", "")


DECODE = """
import shutil, redrafter
from redrafter.kernels.cpu import library
assert not shutil.which("g++") and not shutil.which("clang++")
engine = redrafter.load(device="cpu")
assert engine.target.forward_kind == "packed, int16 activations"
assert "prebuilt" in library.library()._name
sides, options = (engine, engine.plain()), {"max_new_tokens": 12, "ignore_eos": True}
texts = [side.generate("Why is the sky blue?", **options).text for side in sides]
assert texts[0] == texts[1], texts
print(texts[0])
"""


def test_the_default_model_decodes_without_a_compiler(installed):
    """The folder of compiled libraries is new, so they come from the wheel."""
    python = installed / "env" / "bin" / "python"
    text = run(python, "-c", DECODE, cwd=installed, PATH=str(python.parent), REDRAFTER_CACHE=str(installed / "cache"))
    assert len(text.split()) > 3
