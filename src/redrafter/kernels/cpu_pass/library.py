"""Loads this folder's C++ for one set of CPU instructions, compiled before or now, and names what it takes."""

import ctypes
import functools
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch

from redrafter.kernels.cpu import native
from redrafter.kernels.cpu_pass.flags import FLAGS, INSTRUCTIONS

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

FLOAT, LONG, POINTER = ctypes.c_float, ctypes.c_long, ctypes.c_void_p


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Matrix(ctypes.Structure):
    """As in formats.h."""

    _fields_: ClassVar[list[Any]] = [("data", POINTER), *fields(LONG, "rows", "columns", "tiles", "format")]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
VECTORS = (
    *("q_bias", "k_bias", "v_bias", "o_bias"),
    *("before", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp"),
)


class Layer(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(Matrix, *MATRICES),
        *fields(POINTER, *VECTORS),
        *fields(LONG, "rotation", "window"),
    ]


class Model(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        ("layers", ctypes.POINTER(Layer)),
        *fields(LONG, "layer_count", "hidden", "heads", "kv_heads", "size", "middle", "gate"),
        *fields(Matrix, "embedding", "head"),
        ("final_norm", POINTER),
        *fields(FLOAT, "eps", "scale", "embedding_scale"),
    ]


class Pass(ctypes.Structure):
    """As in model.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(POINTER, "tokens", "positions", "slots", "visible"),
        *[*fields(LONG, "visible_row", "visible_step"), ("key_positions", POINTER), ("extent", LONG)],
        *[*fields(POINTER, "cos", "sin", "keys", "values"), *fields(LONG, "row_step", "head_step")],
        *[("wanted", POINTER), ("wanted_count", LONG), ("hidden", POINTER)],
        *[("kept", POINTER), ("kept_count", LONG), ("logits", POINTER)],
        *[*fields(LONG, "rows", "nodes", "threads"), ("real", POINTER)],
        *fields(LONG, "real_count", "cache", "rounds"),
    ]


SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "packed_bytes": ([LONG] * 3, LONG),
    "pack_quantised": ([LONG, *[POINTER] * 3, LONG, LONG, POINTER, LONG], None),
    "pack_floats": ([LONG, POINTER, LONG, LONG, POINTER, LONG], None),
    "quantise": ([LONG, POINTER, LONG, LONG, *[POINTER] * 3, LONG], None),
    "take_rows": ([POINTER, POINTER, LONG, POINTER], None),
    "multiply": ([POINTER, POINTER, LONG, POINTER, LONG, LONG], None),
    "run_pass": ([POINTER, POINTER], None),
    "run_draft": ([POINTER, POINTER], None),
    "run_take": ([POINTER, POINTER], None),
}

TRY = """
import ctypes, sys
class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *[(n, ctypes.c_long) for n in ("rows", "columns", "tiles", "format")]]
lib, x, long = ctypes.CDLL(sys.argv[1]), (ctypes.c_float * 512)(*[1.0] * 512), ctypes.c_long
ones, halves = (ctypes.c_int8 * 512)(*[1] * 512), (ctypes.c_uint16 * 16)(*[0x3C00] * 16)
packed, y = (ctypes.c_char * 2048)(), (ctypes.c_float * 16)()
def tried(form, rounds):
    matrix = Matrix(ctypes.addressof(packed), 16, 32, 1, form)
    lib.multiply(ctypes.byref(matrix), x, long(1), y, long(rounds), long(1))
    assert list(y) == [32.0] * 16, list(y)
lib.pack_floats(long(7), x, long(16), long(32), packed, long(1))
tried(7, 0)
lib.pack_quantised(long(3), ones, halves, None, long(16), long(32), packed, long(1))
tried(3, 1)
"""
"""Run in a process of its own: a virtual machine may report instructions that it cannot run, which is fatal."""


def supported() -> list[str]:
    """The sets of instructions that this CPU has, the fastest first."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = {"AVX512": ["avx512", "avx2"], "AVX2": ["avx2"]}.get(capability, [])
    if "avx512" in found and torch.cpu._is_vnni_supported():
        found.insert(0, "avx512_vnni")
    if platform.machine() in ("aarch64", "arm64"):
        has_dotprod = sys.platform == "darwin" or "asimddp" in native.cpu_features()
        found = ["neon_dotprod", "neon"] if has_dotprod else ["neon"]
    return [*found, "portable"]


def chosen() -> str:
    """The set of instructions to use: the fastest, or what REDRAFTER_INSTRUCTIONS says."""
    asked = os.environ.get("REDRAFTER_INSTRUCTIONS")
    return asked if asked in supported() else supported()[0]


def can_run() -> bool:
    """Whether `library` is expected to find or make the compiled functions, without compiling them."""
    if os.environ.get("REDRAFTER_NATIVE") == "0":
        return False
    return prebuilt(chosen()).exists() or native.find_compiler() is not None


def prebuilt(instructions: str) -> Path:
    """Where a wheel has the library for one set of instructions."""
    return PREBUILT / f"{instructions}.so"


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None if they cannot be compiled or loaded.

    An old compiler may not know the fastest instructions, and a virtual machine may not run them: then the next set.
    """
    names = supported()
    return next(filter(None, map(load, names[names.index(chosen()) :])), None) if can_run() else None


@functools.cache
def load(instructions: str) -> ctypes.CDLL | None:
    """The functions for one set of instructions: from the wheel, or compiled at first use."""
    try:
        loaded = _load_prebuilt(instructions) or _compile(instructions)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: no home folder
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.info("the quantised CPU path has no %s: %s", instructions, said[0] if said else error)
        return None
    if loaded is not None:
        for name, (types, result) in SIGNATURES.items():
            getattr(loaded, name).argtypes, getattr(loaded, name).restype = types, result
    return loaded


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
    """The library compiled here, kept beside that of kernels/cpu; None without a compiler."""
    compiler = native.find_compiler()
    if compiler is None:
        return None
    flags = [*FLAGS, "-shared", *INSTRUCTIONS[instructions]]
    path = native.folder() / f"pass-{instructions}-{native.key(compiler, flags, HERE)}.so"
    if not path.exists():
        log.info("compiling the quantised CPU path (%s), once", instructions)
    native.compile_sources(compiler, HERE, flags, path, TRY)
    return ctypes.CDLL(str(path))
