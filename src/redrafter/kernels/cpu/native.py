"""Compiles this folder's C++ at first use, once per machine, and loads it. Without a compiler torch is used."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
FLOAT, LONG, POINTER = ctypes.c_float, ctypes.c_long, ctypes.c_void_p
SIGNATURES = {
    "linear": [POINTER] * 4 + [LONG] * 4,
    "linear3": [*([POINTER] * 4 + [LONG]), *([POINTER] * 3 + [LONG]) * 2, *[LONG] * 3],
    "gated": [POINTER] * 6 + [LONG] * 4,
    "rms_norm": [POINTER, POINTER, FLOAT, FLOAT, POINTER, LONG, LONG],
    "rotate_and_store": [POINTER] * 8 + [LONG] * 7,
    "block": [POINTER] * 8 + [LONG] * 2 + [POINTER] + [LONG] * 6,
    "move_path": [POINTER] * 3 + [LONG] * 8,
    "uniform": [POINTER, POINTER, LONG, LONG, FLOAT],
    "attend": [
        *[POINTER, LONG, LONG, LONG],
        *[POINTER, LONG, LONG] * 3,
        *[POINTER] + [LONG] * 6 + [FLOAT, LONG],
    ],
}


TRY = """
import ctypes, sys
x, y = (ctypes.c_float * 256)(*[1.0] * 256), (ctypes.c_float * 4)()
ctypes.CDLL(sys.argv[1]).linear(x, x, None, y, *map(ctypes.c_long, (2, 128, 2, 1)))
assert list(y) == [128.0] * 4
"""
"""Run in a process of its own: a virtual machine may report instructions that it cannot run, which is fatal."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if they cannot be compiled or loaded."""
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler (g++ or clang++) here: the CPU path runs on torch alone, which is slower")
        return None
    try:
        loaded = ctypes.CDLL(str(build(compiler, folder())))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: no home folder
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.info("the CPU path runs on torch alone, which is slower: %s", said[0] if said else error)
        return None
    for name, types in SIGNATURES.items():
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = types, None
    return loaded


def built() -> str:
    """The file name of the library, which names its source, compiler and CPU; empty without a library."""
    found = library()
    return Path(found._name).name if found is not None else ""


def status() -> str:
    """Whether `library` will find the compiled functions, without compiling them."""
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return "off (REDRAFTER_NATIVE=0)"
    compiler = find_compiler()
    if compiler is None:
        return "not available (no C++ compiler: install g++ or clang++)"
    try:
        return "compiled" if library_path(compiler, folder()).exists() else "not compiled yet (done at first use)"
    except (OSError, RuntimeError) as error:
        return f"not available ({error})"


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def folder() -> Path:
    """Where the library is kept: beside the converted default model, whose code is in a higher layer."""
    if chosen := os.environ.get("REDRAFTER_CACHE"):
        return Path(chosen) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter" / "native"


def build(compiler: str, into: Path) -> Path:
    """Compile, unless done before for this source, compiler and CPU.

    Several processes may compile at once: each uses a temporary name and moves the result into place.
    """
    target = library_path(compiler, into)
    compile_sources(compiler, HERE, [*FLAGS, *openmp()], target, TRY)
    return target


def compile_sources(compiler: str, sources: Path, flags: list[str], target: Path, trial: str) -> None:
    """Compile a folder's C++ into the library `target` unless it exists. `trial` is Python code that tries it.

    Files are compiled at the same time.
    """
    if target.exists():
        return
    into = target.parent
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        fresh = Path(scratch) / target.name

        def compiled(source: Path) -> str:
            made = str(fresh.with_name(f"{source.stem}.o"))
            _run([compiler, "-c", str(source), "-o", made, *flags])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(sources.glob("*.cpp"))))
        _run([compiler, *objects, "-o", str(fresh), *flags])
        _run([sys.executable, "-c", trial, str(fresh)])
        fresh.replace(target)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def library_path(compiler: str, into: Path) -> Path:
    """The file that `build` writes for this source, compiler and CPU."""
    return into / f"skinny-{key(compiler, [*FLAGS, *openmp()])}.so"


def key(compiler: str, flags: list[str], sources: Path = HERE) -> str:
    """A hash of the source, the compiler, its flags and the CPU."""
    digest = hashlib.sha256()
    for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(file.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\n".join([version, *flags, platform.machine(), cpu_features()]).encode())
    return digest.hexdigest()[:16]


def cpu_features() -> str:
    """What `-march=native` depends on: machines may share a cache folder."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))


def openmp() -> list[str]:
    """Link torch's own OpenMP if it has one: two thread pools would compete for the cores."""
    found = torch_openmp()
    return [str(found), "-Wl,--as-needed", f"-Wl,-rpath,{found.parent}"] if found is not None else []


def torch_openmp() -> Path | None:
    home = Path(torch.__file__).parent
    found = sorted([*(home / "lib").glob("libgomp*.so*"), *home.parent.glob("torch.libs/libgomp*.so*")])
    return found[0] if found else None
