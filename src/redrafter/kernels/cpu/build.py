"""Compiles the C++ of a folder into one library. setup.py runs this file alone: it imports nothing of the package."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-Wno-psabi")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VNNI = (*AVX512, "-mavx512vnni")
INSTRUCTIONS = {
    "avx512_amx": (*VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512_vnni": VNNI,
    "avx512": AVX512,
    "avx2": AVX2,
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": (),
    "portable": ("-DPORTABLE",),
}
"""Compiler flags of each set of instructions, the fastest first. `portable` runs on every CPU."""
MACHINES = {
    "x86_64": ("avx512_amx", "avx512_vnni", "avx512", "avx2", "portable"),
    "aarch64": ("neon_dotprod", "neon", "portable"),
}
"""The sets of instructions that a wheel for Linux brings, by machine."""


def compile_library(compiler: Sequence[str], sources: Path, instructions: str, target: Path) -> None:
    """Compile for one set of instructions, all files at the same time."""
    strip = ("-s",) if sys.platform == "linux" else ()
    with tempfile.TemporaryDirectory() as scratch:

        def compiled(source: Path) -> str:
            made = str(Path(scratch, f"{source.stem}.o"))
            _run([*compiler, "-c", str(source), "-o", made, *FLAGS, *INSTRUCTIONS[instructions]])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(sources.glob("*.cpp"))))
        _run([*compiler, "-shared", "-pthread", *strip, *objects, "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
