"""Reads a GGUF file: its metadata and its tensors, memory-mapped.

A file is a header (magic, version, counts), metadata by name, a table of tensors, and the tensors' data, each at a
multiple of the alignment. Every number is checked against the size of the file before it is used.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redrafter.errors import CorruptCheckpoint, ModelNotFound, UnsupportedTarget

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of tensors in a file that names none."""
LEAST_ALIGNMENT = 8
"""Alignments must be multiples of this, as the format demands."""
MOST_DIMENSIONS = 4
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Metadata types that are one number, as `struct` names them."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layout:
    """How a tensor type stores its values: `values` values in each block of `size` bytes."""

    name: str
    values: int
    size: int


LAYOUTS = {
    0: Layout("F32", 1, 4),
    1: Layout("F16", 1, 2),
    2: Layout("Q4_0", 32, 18),
    3: Layout("Q4_1", 32, 20),
    6: Layout("Q5_0", 32, 22),
    7: Layout("Q5_1", 32, 24),
    8: Layout("Q8_0", 32, 34),
    12: Layout("Q4_K", 256, 144),
    13: Layout("Q5_K", 256, 176),
    14: Layout("Q6_K", 256, 210),
    20: Layout("IQ4_NL", 32, 18),
    30: Layout("BF16", 1, 2),
    39: Layout("MXFP4", 32, 17),
}
"""The tensor types that redrafter reads, by their number in the file."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in the file. The last axis of `shape` is the one that is stored contiguously."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    data: Array  # uint8, (rows, bytes of a row)


class GGUFFile:
    """An open GGUF file. Tensors are views of the mapped file, so they take no memory of their own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFound(f"no file {self.path}") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CorruptCheckpoint(f"cannot read {self.path} ({error}); copy it again") from error
        self._at = 0
        self._check_magic()
        tensor_count, metadata_count = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self._bounded(metadata_count, 13, "metadata entries")):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(self._bounded(tensor_count, 24, "tensors"))]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % LEAST_ALIGNMENT:
            raise self.corrupt(f"its alignment is {alignment!r}, no multiple of {LEAST_ALIGNMENT}")
        begin = -(-self._at // alignment) * alignment
        self.tensors: dict[str, Tensor] = {}
        for name, shape, kind, at in entries:
            if name in self.tensors:
                raise self.corrupt(f"it has two tensors {name!r}")
            if at % alignment:
                raise self.corrupt(f"the tensor {name!r} begins at {at}, no multiple of the alignment {alignment}")
            self.tensors[name] = self._tensor(name, shape, kind, begin + at)

    def corrupt(self, why: str) -> CorruptCheckpoint:
        """The error for a file that is damaged."""
        return CorruptCheckpoint(f"{self.path} is damaged: {why}; copy it again")

    def _check_magic(self) -> None:
        if self._bytes[:4] != MAGIC:
            raise CorruptCheckpoint(f"{self.path} is no GGUF file: it begins with {self._bytes[:4]!r}, not with GGUF")
        self._at = 4
        version = self._number("I")
        if version in VERSIONS:
            return
        if int.from_bytes(struct.pack("<I", version), "big") in VERSIONS:
            raise UnsupportedTarget(f"{self.path} is a big-endian GGUF file; convert it to little-endian")
        known = " and ".join(str(v) for v in VERSIONS)
        raise UnsupportedTarget(f"{self.path} has GGUF version {version}; redrafter reads {known}: convert it again")

    def _take(self, count: int) -> int:
        """The start of the next `count` bytes, and step over them."""
        start = self._at
        if count > len(self._bytes) - start:
            raise self.corrupt(f"it ends within its header, after {len(self._bytes)} bytes")
        self._at = start + count
        return start

    def _bounded(self, count: int, least: int, what: str) -> int:
        """A count of items of at least `least` bytes each, which must fit into the rest of the file."""
        if count * least > len(self._bytes) - self._at:
            raise self.corrupt(f"it claims {count} {what} and has {len(self._bytes)} bytes")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._bytes, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """The next texts, each after its length. A vocabulary has 100,000 of them, so this is one loop."""
        content, size, at, found = self._bytes, len(self._bytes), self._at, []
        for _ in range(self._bounded(count, 8, "texts in a list")):
            start = at + 8
            at = start + int.from_bytes(content[start - 8 : start], "little")
            if at > size:
                raise self.corrupt(f"it ends within its header, after {size} bytes")
            try:
                found.append(content[start:at].decode())
            except UnicodeDecodeError as error:
                raise self.corrupt(f"a text at byte {start} is not UTF-8") from error
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in NUMBERS:
            raise self.corrupt(f"metadata at byte {self._at} has the unknown type {kind}")
        value = self._number(NUMBERS[kind])
        return bool(value) if kind == BOOL else value

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self._strings(count)
        if kind not in NUMBERS:
            raise self.corrupt(f"a metadata list at byte {self._at} has the unsupported type {kind}")
        code = np.dtype("<" + NUMBERS[kind])
        start = self._take(self._bounded(count, code.itemsize, "numbers in a list") * code.itemsize)
        found = np.frombuffer(self._bytes, code, count, start)
        values: list[Any] = (found != 0 if kind == BOOL else found).tolist()
        return values

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self.corrupt(f"the tensor {name!r} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
        layout = LAYOUTS.get(kind)
        if layout is None:
            known = ", ".join(each.name for each in LAYOUTS.values())
            raise UnsupportedTarget(
                f"{self.path}: the tensor {name!r} has the type {kind}, which redrafter does not read; "
                f"use a file with {known}"
            )
        rows, columns = 1, shape[-1]
        for size in shape[:-1]:
            rows *= size
        if columns % layout.values or columns == 0 or rows == 0:
            raise self.corrupt(f"the tensor {name!r} has the shape {shape}, which {layout.name} cannot have")
        width = columns // layout.values * layout.size
        if start + rows * width > len(self._bytes):
            raise self.corrupt(f"it ends within the tensor {name!r}, after {len(self._bytes)} bytes")
        data = np.frombuffer(self._bytes, np.uint8, rows * width, start).reshape(rows, width)
        return Tensor(name, shape, layout, data)


def is_gguf(model: str | Path | None) -> bool:
    return model is not None and str(model).endswith(".gguf")
