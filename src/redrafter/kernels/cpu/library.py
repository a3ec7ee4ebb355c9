"""The compiled C++ of this folder for one set of CPU instructions: from the wheel, or compiled at first use."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch

from redrafter.cache_folder import LIBRARIES, cache_folder, is_intact, keep
from redrafter.errors import CacheUnavailable, ConfigError
from redrafter.kernels.cpu.build import FLAGS, INSTRUCTIONS, compile_library

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
PREBUILT = HERE / "prebuilt"
"""A wheel brings the library of each set of instructions; a checkout has none."""

FORMATS = (
    "4 bits, fp16 scale and minimum",
    "4 bits, fp32 scale and minimum",
    "4 bits, fp16 scale, zero at 8",
    "8 bits, fp16 scale",
    "8 bits, fp16 scale and minimum",
    "8 bits, fp32 scale and minimum",
    "8 bits, fp32 scale for each 16",
    "fp32",
    "fp16",
    "bf16",
)
"""How weights lie in memory, in the order of formats.h."""

AMX = {"amx_tile", "amx_int8", "amx_bf16"}
"""What Linux calls the parts of AMX that a CPU has."""
ASK_FOR_TILES = (158, 0x1023, 18)
"""Of Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20
"""Of Linux on 64-bit ARM: where it tells each process what the CPU can do, and the bit for dot products of bytes."""

FLOAT, LONG, POINTER = ctypes.c_float, ctypes.c_long, ctypes.c_void_p
SIGNATURES: dict[str, list[Any]] = {
    "packed_bytes": [LONG] * 3,
    "pack_quantised": [LONG, *[POINTER] * 3, LONG, LONG, POINTER, LONG],
    "pack_floats": [LONG, POINTER, LONG, LONG, POINTER, LONG],
    "quantise": [LONG, POINTER, LONG, LONG, *[POINTER] * 3, LONG],
    "take_rows": [POINTER, POINTER, LONG, POINTER],
    "multiply": [POINTER, POINTER, LONG, POINTER, LONG, LONG],
    "run_pass": [POINTER, POINTER],
    "run_draft": [POINTER, POINTER],
    "run_take": [POINTER, POINTER],
    "linear": [POINTER] * 4 + [LONG] * 4,
    "linear3": [*([POINTER] * 4 + [LONG]), *([POINTER] * 3 + [LONG]) * 2, *[LONG] * 3],
    "gated": [POINTER] * 5 + [LONG] * 4,
    "norm": [POINTER, POINTER, FLOAT, FLOAT, POINTER, LONG, LONG],
    "rotate_and_store": [POINTER] * 8 + [LONG] * 8,
    "attention": [*([POINTER] * 3 + [LONG] * 2), POINTER, LONG, LONG, POINTER, *[LONG] * 6, FLOAT, LONG],
    "block": [POINTER] * 8 + [LONG] * 3 + [POINTER] + [LONG] * 6,
    "move_path": [POINTER] * 3 + [LONG] * 9,
    "uniform": [POINTER, POINTER, LONG, LONG, FLOAT],
    "gumbel": [POINTER, POINTER, LONG, LONG, FLOAT, LONG],
}
"""What the functions take."""
CHECKED = ("take_rows", "run_pass", "run_draft", "run_take", "rotate_and_store", "block", "move_path")
"""Those that are given indexes. They return whether all are inside, as in indexes.h; if not, nothing was run."""
OUTSIDE_VOCABULARY, DONE = 0, 1


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Matrix(ctypes.Structure):
    """As in formats.h."""

    _fields_: ClassVar[list[Any]] = [("data", POINTER), *fields(LONG, "rows", "columns", "tiles", "format")]


TRY = """
import ctypes, sys
class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *[(n, ctypes.c_long) for n in ("rows", "columns", "tiles", "format")]]
lib, x, long = ctypes.CDLL(sys.argv[1]), (ctypes.c_float * 1024)(*[1.0] * 1024), ctypes.c_long
values, halves = lambda value: (ctypes.c_int8 * 512)(*[value] * 512), (ctypes.c_uint16 * 16)(*[0x3C00] * 16)
packed, y = (ctypes.c_char * 2048)(), (ctypes.c_float * 512)()
def tried(form, bits):
    matrix = Matrix(ctypes.addressof(packed), 16, 32, 1, form)
    for n in (1, 32):
        lib.multiply(ctypes.byref(matrix), x, long(n), y, long(bits), long(1))
        assert list(y[:16 * n]) == [32.0] * 16 * n, list(y)
lib.pack_floats(long(7), x, long(16), long(32), packed, long(1))
tried(7, 0)
for form, value in ((2, 9), (3, 1)):
    lib.pack_quantised(long(form), values(value), halves, None, long(16), long(32), packed, long(1))
    tried(form, 8), tried(form, 16)
"""
"""Run in a process of its own: a virtual machine may report instructions that it cannot run, which is fatal."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if they cannot be compiled or loaded.

    An old compiler may not know the fastest instructions, and a virtual machine may not run them: then the next set.
    """
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return None
    if not can_run():
        log.info("no C++ compiler (g++ or clang++) here: the CPU path runs on torch alone, which is slower")
        return None
    names = supported()
    found = next(filter(None, map(load, names[names.index(chosen()) :])), None)
    if found is None:
        log.info("the CPU path runs on torch alone, which is slower")
    return found


def loaded() -> ctypes.CDLL:
    """`library`, where it is known to be there."""
    found = library()
    assert found is not None
    return found


def require_done(done: int, rows: int = 0) -> None:
    """Raise if one of CHECKED found an index outside: a token's of a vocabulary of `rows` tokens, or another."""
    if done == OUTSIDE_VOCABULARY:
        raise ConfigError(f"got a token outside the model's vocabulary of {rows} tokens")
    if done != DONE:
        raise IndexError("a position, slot, column or count is outside its tensor; nothing was run")


@functools.cache
def load(instructions: str) -> ctypes.CDLL | None:
    """The functions for one set of instructions: from the wheel, or compiled at first use."""
    try:
        made = _load_prebuilt(instructions) or _compile(instructions)
    except (OSError, CacheUnavailable, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.info("no C++ for %s: %s", instructions, said[0] if said else error)
        return None
    if made is not None:
        for name, types in SIGNATURES.items():
            function = getattr(made, name)
            function.argtypes, function.restype = types, LONG if name in (*CHECKED, "packed_bytes") else None
    return made


def _load_prebuilt(instructions: str) -> ctypes.CDLL | None:
    """The wheel's library, not tried out first: it has the instructions that torch itself uses on this CPU."""
    path = prebuilt(instructions)
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # made for another C library
        log.info("the library %s does not load (%s)", path, error)
        return None


def _compile(instructions: str) -> ctypes.CDLL | None:
    """The library compiled here; None without a compiler. Several processes may compile at once."""
    compiler = find_compiler()
    if compiler is None:
        return None
    kept = compiled(compiler, instructions)

    def compile_into(folder: Path) -> None:
        log.info("compiling the C++ for CPUs (%s), once", instructions)
        folder.mkdir()
        fresh = folder / f"{kept.name}.so"
        compile_library([compiler], HERE, instructions, fresh)
        subprocess.run([sys.executable, "-c", TRY, str(fresh)], check=True, capture_output=True, text=True)

    return ctypes.CDLL(str(keep(kept, compile_into) / f"{kept.name}.so"))


def prebuilt(instructions: str) -> Path:
    """Where a wheel has the library for one set of instructions."""
    return PREBUILT / f"{instructions}.so"


def compiled(compiler: str, instructions: str) -> Path:
    """The folder of the library that was compiled here, by this compiler for this CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*FLAGS, *INSTRUCTIONS[instructions]]
    return folder() / f"{instructions}-{_digest(version, *flags, platform.machine(), cpu_features())}"


def folder() -> Path:
    """Where compiled libraries are kept."""
    return cache_folder() / LIBRARIES


def built() -> str:
    """Names the library and its source; empty without a library."""
    found = library()
    return f"{Path(found._name).name} {_digest()}" if found is not None else ""


def _digest(*about: str) -> str:
    """A hash of the source, and of what else it is said to depend on."""
    digest = hashlib.sha256("\n".join(about).encode())
    for file in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def can_run() -> bool:
    """Whether `library` is expected to find or make the compiled functions, without compiling them."""
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return False
    return has_prebuilt() or find_compiler() is not None


def has_prebuilt() -> bool:
    """Whether a wheel brought a library that this CPU runs; an old compiler leaves the fastest ones out."""
    names = supported()
    return any(prebuilt(name).exists() for name in names[names.index(chosen()) :])


def status() -> str:
    """Whether `library` will find the compiled functions, in words, without compiling them."""
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return "off (REDRAFTER_NATIVE=0)"
    if has_prebuilt():
        return "compiled"
    compiler = find_compiler()
    if compiler is None:
        return "not available (no C++ compiler: install g++ or clang++)"
    try:
        return "compiled" if is_intact(compiled(compiler, chosen())) else "not compiled yet (done at first use)"
    except (OSError, CacheUnavailable) as error:
        return f"not available ({error})"


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def chosen() -> str:
    """The set of instructions to use: the fastest, or what REDRAFTER_INSTRUCTIONS says."""
    asked = os.environ.get("REDRAFTER_INSTRUCTIONS")
    return asked if asked in supported() else supported()[0]


def supported() -> list[str]:
    """The sets of instructions that this CPU has, the fastest first."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = {"AVX512": ["avx512", "avx2"], "AVX2": ["avx2"]}.get(capability, [])
    if "avx512" in found and torch.cpu._is_vnni_supported():
        found.insert(0, "avx512_vnni")
        if can_use_amx():
            found.insert(0, "avx512_amx")
    if platform.machine() in ("aarch64", "arm64"):
        found = ["neon_dotprod", "neon"] if has_dotprod() else ["neon"]
    return [*found, "portable"]


@functools.cache
def can_use_amx() -> bool:
    """Whether the CPU has tiles of bytes and of bf16, and the operating system grants them when it is asked."""
    if not AMX.issubset(cpu_features().split()):
        return False
    granted = bool(ctypes.CDLL(None).syscall(*ASK_FOR_TILES) == 0)
    if not granted:
        log.info("the operating system does not let this process use AMX: AVX-512 is used without it")
    return granted


def has_dotprod() -> bool:
    """Whether this 64-bit ARM CPU has dot products of bytes: every Mac's has; Linux tells each process."""
    return sys.platform == "darwin" or bool(ctypes.CDLL(None).getauxval(AT_HWCAP) & HWCAP_ASIMDDP)


def cpu_features() -> str:
    """What a CPU can do: machines may share a cache folder."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
