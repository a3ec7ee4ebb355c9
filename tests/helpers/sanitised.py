"""The compiled CPU functions under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

import ctypes
import os
import subprocess
import sys
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from redrafter.kernels.cpu import build, library
from redrafter.kernels.cpu.packed import ALIGNMENT, Memory

ROOT = Path(__file__).parents[2]
COMPILER = ("g++", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
INSTRUCTIONS = "avx2" if "avx2" in library.supported() else "portable"
REPORTED = 99
"""The exit code of a process that a sanitizer ended."""
UNCHECKED = "unchecked.so"
"""`take_rows` without its check, for twins."""


def _compile(sources: Path, target: Path) -> None:
    flags = tuple(flag.replace("-O3", "-O1") for flag in build.FLAGS)  # GCC takes many times as long for -O3
    with mock.patch.object(build, "FLAGS", flags):
        build.compile_library(COMPILER, sources, INSTRUCTIONS, target)


def make(kept: Path) -> Path:
    """The folder of the compiled functions, as a wheel would have it. Compiling takes minutes, so it is kept."""
    folder = kept / library._digest(*COMPILER, INSTRUCTIONS)
    folder.mkdir(parents=True, exist_ok=True)
    if not (made := folder / f"{INSTRUCTIONS}.so").exists():
        _compile(library.HERE, part := folder / "part.so")
        part.replace(made)
    return folder


def make_unchecked(folder: Path, scratch: Path) -> None:
    """`take_rows` whose range check finds nothing, beside the other functions."""
    for file in [library.HERE / "pack.cpp", *library.HERE.glob("*.h")]:
        text = file.read_text()
        if file.name == "indexes.h":
            whole, text = text, text.replace("if (index[i] < 0 || index[i] >= end) return false;", "(void)end;")
            assert text != whole
        (scratch / file.name).write_text(text)
    _compile(scratch, folder / UNCHECKED)


def run(folder: Path, module: str, *arguments: Any, seconds: float) -> subprocess.CompletedProcess[str]:
    """The function `main` of a module with these arguments, in a process that has the sanitizers."""
    found = [subprocess.run(["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True).stdout
             for name in ("libasan", "libubsan")]  # fmt: skip
    options = f"detect_leaks=0:exitcode={REPORTED}:quarantine_size_mb=64:allocator_may_return_null=1"
    env = os.environ | {
        "LD_PRELOAD": ":".join(name.strip() for name in found),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={REPORTED}",
        "REDRAFTER_INSTRUCTIONS": INSTRUCTIONS,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.helpers.sanitised", *map(str, (folder, module, *arguments))]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=seconds)


def use(folder: Path) -> None:
    """In that process: let everything run the functions of `folder`. To be called before they are first used."""
    library.PREBUILT = folder
    Memory.take = _apart  # type: ignore[method-assign]
    found = library.loaded()
    assert Path(found._name).parent == folder, found._name


def use_unchecked() -> None:
    """In that process: let `take_rows` run without its check."""
    found = library.loaded()
    ctypes.CDLL(found._name, ctypes.RTLD_GLOBAL)
    found.take_rows = ctypes.CDLL(str(Path(found._name).with_name(UNCHECKED))).take_rows
    found.take_rows.argtypes = library.SIGNATURES["take_rows"]


def _apart(_: Memory, size: int) -> np.ndarray[Any, Any]:
    """Zeroed memory of its own, so that the sanitizer sees its ends, and that nobody reads it once it is freed."""
    at, libc = ctypes.c_void_p(), ctypes.CDLL(None)
    assert libc.posix_memalign(ctypes.byref(at), ctypes.c_size_t(ALIGNMENT), ctypes.c_size_t(max(size, 1))) == 0
    assert at.value is not None
    room = (ctypes.c_uint8 * size).from_address(at.value)
    weakref.finalize(room, libc.free, at)
    made = np.frombuffer(room, np.uint8)
    made[:] = 0
    return made


if __name__ == "__main__":
    use(Path(sys.argv[1]))
    import_module(sys.argv[2]).main(*sys.argv[3:])
