"""Compiles the C++ for CPUs into the wheel, so that a machine without a compiler has it.

The compiler is $CXX, g++ or clang++. Without one, and in an editable install, the wheel has no library: it is
compiled at first use. For another machine, name its compiler and its platform:

    CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 pip wheel --no-deps .

The rest of the build is described in pyproject.toml.
"""

import os
import runpy
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("redrafter", "kernels", "cpu")
SOURCES = Path(__file__).parent / "src" / KERNELS
BUILD = runpy.run_path(str(SOURCES / "build.py"))
COMPILER = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
SYSTEM, _, MACHINE = sysconfig.get_platform().partition("-")


def compiles_for(machine: str) -> bool:
    """Whether there is a compiler that makes code for this machine: another machine needs its cross compiler."""
    asked = [*COMPILER, "-x", "c++", "-dM", "-E", os.devnull]  # for its macros, which tell the machine
    try:
        macros = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return f"#define __{machine}__ 1" in macros


SETS = BUILD["MACHINES"].get(MACHINE, ()) if SYSTEM == "linux" and compiles_for(MACHINE) else ()
"""The sets of instructions to compile for."""


class BuildWithLibraries(build_py):
    """Copies the package, then compiles."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        into = Path(self.build_lib, KERNELS, "prebuilt")
        shutil.rmtree(into, ignore_errors=True)  # an earlier build may have been for another machine
        into.mkdir(parents=True)
        for name in SETS:
            try:
                BUILD["compile_library"](COMPILER, SOURCES, name, into / f"{name}.so")
            except (OSError, subprocess.CalledProcessError) as error:  # an old compiler may not know the instructions
                said = getattr(error, "stderr", None) or error
                self.warn(f"the wheel has no library for {name}; CPUs that have these instructions use others: {said}")
        if not any(into.iterdir()):
            into.rmdir()


class WheelOfOnePlatform(bdist_wheel):
    """One wheel serves every version of Python, because the libraries are called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(SETS)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelOfOnePlatform})
