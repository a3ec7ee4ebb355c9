"""Compiles the CPU's quantised pass into the wheel, so that a machine without a compiler has it.

The compiler is $CXX, g++ or clang++. Without one, and in an editable install, the wheel has no library: the pass is
compiled at first use. For another machine, name its compiler and its platform:

    CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 pip wheel --no-deps .

The rest of the build is described in pyproject.toml.
"""

import os
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PASS = Path("redrafter", "kernels", "cpu_pass")
SOURCES = Path(__file__).parent / "src" / PASS
SETTINGS = runpy.run_path(str(SOURCES / "flags.py"))
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
SYSTEM, _, MACHINE = sysconfig.get_platform().partition("-")
SETS = SETTINGS["MACHINES"].get(MACHINE, ()) if SYSTEM == "linux" and COMPILER else ()
"""The sets of instructions to compile for."""


def compile_library(instructions: str, target: Path) -> None:
    """OpenMP stays unlinked: torch brings its own, and two would compete for the cores."""
    flags = [*SETTINGS["FLAGS"], *SETTINGS["INSTRUCTIONS"][instructions]]
    with tempfile.TemporaryDirectory() as scratch:
        sources = [str(path.resolve()) for path in sorted(SOURCES.glob("*.cpp"))]
        subprocess.run([COMPILER, "-c", *flags, *sources], cwd=scratch, check=True)
        objects = [str(path) for path in sorted(Path(scratch).glob("*.o"))]
        subprocess.run([COMPILER, "-shared", "-s", *objects, "-o", str(target)], check=True)


class BuildWithLibraries(build_py):
    """Copies the package, then compiles."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        into = Path(self.build_lib, PASS, "prebuilt")
        into.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: compile_library(name, into / f"{name}.so"), SETS))


class WheelOfOnePlatform(bdist_wheel):
    """One wheel serves every version of Python, because the libraries are called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(SETS)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfOnePlatform})
