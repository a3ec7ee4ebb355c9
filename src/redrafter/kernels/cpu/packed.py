"""Packs matrices for the kernels and multiplies by them."""

import ctypes
import mmap
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats, Matrix, Quantised
from redrafter.kernels.threads import thread_count

PIECE = 1 << 26
"""Bytes that memory is asked for at once: large pieces can lie in huge pages, which a pass reads faster."""
ALIGNMENT = 64


class Memory:
    """Zeroed memory for packed matrices, from a few large pieces. It is freed with the last object that holds it."""

    def __init__(self) -> None:
        self.piece = np.zeros(0, dtype=np.uint8)
        self.used = 0

    def take(self, size: int) -> np.ndarray[Any, Any]:
        if self.used + size > len(self.piece):
            room = mmap.mmap(-1, max(size, PIECE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)
            self.piece, self.used = np.frombuffer(room, np.uint8), 0
        start = self.used
        self.used = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        return self.piece[start : start + size]


class PackedMatrix:
    """A matrix in the layout of formats.h."""

    def __init__(self, matrix: Matrix, memory: Memory | None = None) -> None:
        lib = self.lib = library.loaded()
        self.quantised = isinstance(matrix, Quantised)
        rows, columns = self.shape = (matrix.shape[0], matrix.shape[1])
        kind = format_of(matrix)
        self.data = (memory or Memory()).take(lib.packed_bytes(kind, rows, columns))
        at = self.data.ctypes.data
        inputs = 16 if kind == library.FORMATS.index("8 bits, fp32 scale for each 16") else 32
        if isinstance(matrix, Quantised):
            values, scales = whole(matrix.values), whole(matrix.scales)
            least = None if matrix.minimums is None else whole(matrix.minimums)
            given = (values.ctypes.data, scales.ctypes.data, None if least is None else least.ctypes.data)
            lib.pack_quantised(kind, *given, rows, columns, at, thread_count())
        else:
            numbers = whole(matrix.values)
            lib.pack_floats(kind, numbers.ctypes.data, rows, columns, at, thread_count())
        self.fields = library.Matrix(at, rows, columns, -(-columns // inputs), kind)

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix in fp32: ids (...) -> (..., columns)."""
        ids = ids.long().contiguous()
        made = torch.empty(*ids.shape, self.shape[1])
        done = self.lib.take_rows(ctypes.byref(self.fields), ids.data_ptr(), ids.numel(), made.data_ptr())
        library.require_done(done, self.shape[0])
        return made

    def multiply(self, x: Tensor, *, bits: int = 0) -> Tensor:
        """x (..., columns) -> (..., rows). Activations are rounded to 8 or 16 bits; 0: they are in fp32."""
        x = x.contiguous()
        made = torch.empty(*x.shape[:-1], self.shape[0])
        n = x.numel() // self.shape[1]
        self.lib.multiply(ctypes.byref(self.fields), x.data_ptr(), n, made.data_ptr(), bits, thread_count())
        return made


def whole(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """The array, copied unless it is contiguous and aligned: tensors of a safetensors file may lie at any byte."""
    return np.require(array, dtype, ["C", "A"])


def quantise(weights: np.ndarray[Any, Any], bits: Literal[4, 8], group: int = 32) -> Quantised:
    """As `matrices.quantise`, by all threads."""
    weights = whole(weights, np.float32)
    rows, columns = weights.shape
    shape = (rows, columns // group)
    values = np.empty((rows, columns), np.int8 if bits == 8 else np.uint8)
    scales, least = np.empty(shape, np.float16), np.empty(shape, np.float16)
    given, made = weights.ctypes.data, (values.ctypes.data, scales.ctypes.data, least.ctypes.data)
    library.loaded().quantise(bits, given, scales.size, group, *made, thread_count())
    return Quantised(bits, values, scales, None if bits == 8 else least)


def format_of(matrix: Matrix) -> int:
    """The index of a matrix's format in FORMATS."""
    if isinstance(matrix, Floats):
        return library.FORMATS.index({"float32": "fp32", "float16": "fp16", "uint16": "bf16"}[matrix.values.dtype.name])
    name = f"{matrix.bits} bits, fp{8 * matrix.scales.dtype.itemsize} scale"
    if matrix.minimums is not None:
        name += " and minimum"
    if matrix.zero:
        name += f", zero at {matrix.zero}"
    if matrix.group != 32:
        name += f" for each {matrix.group}"
    return library.FORMATS.index(name)
