"""Leave out of a CUDA library the device code of other GPUs than one, and code that is not used.

A library holds fatbins: a header with magic number, version, header size and length, then entries (cubin or PTX), each
with its own header. The kept entries move to the front of their fatbin, its header gets the smaller length, and zeros
fill the rest. No address in the library changes, and the zeros compress to nothing.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from redrafter.errors import ConfigError

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2
HEADER = 16


class Entry(NamedTuple):
    """Device code for one architecture, such as 90 for a Hopper GPU."""

    kind: int
    architecture: int
    start: int
    size: int


def strip(library: bytes, architecture: int, sources: str = "") -> bytes:
    """Keep only the code that a GPU of this architecture uses; leave fatbins of an unknown form as they are.

    `sources` is a pattern of names of CUDA source files. If code is of none of them, the smallest code of the library
    takes its place: calling one of its kernels fails then, but an empty fatbin is an error when the library is loaded.
    """
    data = bytearray(library)
    found = [(start, end, entries_of(library, start + HEADER, end)) for start, end in fatbins(library)]
    smallest = sorted((e for _, _, entries in found for e in entries), key=lambda e: e.size)[:1]
    matched = 0
    for start, end, entries in found:
        if not entries:
            continue
        chosen = used(entries, architecture)
        if any(is_of(library, e, sources) for e in chosen):
            matched += 1
        elif sources:
            chosen = smallest
        kept = b"".join(library[e.start : e.start + e.size] for e in chosen)
        struct.pack_into("<Q", data, start + 8, len(kept))
        data[start + HEADER : end] = kept.ljust(end - start - HEADER, b"\0")
    if sources and not matched:
        raise ConfigError(
            f"no device code was compiled from a file named {sources}: has the library renamed its files?"
        )
    return bytes(data)


def fatbins(library: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of every fatbin, header included."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        end = 0
        if at + HEADER <= len(library):
            _, version, header, size = struct.unpack_from("<IHHQ", library, at)
            end = at + header + size if version == 1 and header == HEADER else 0
        if at < end <= len(library):
            yield at, end
            at = end
        else:
            at += len(MAGIC)  # these bytes mean something else


def entries_of(library: bytes, start: int, end: int) -> list[Entry]:
    """The entries between two addresses; none if they do not fill the space exactly."""
    found = []
    while start + 32 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
        if kind not in (PTX, CUBIN) or not 32 <= header <= 512:
            return []
        (architecture,) = struct.unpack_from("<I", library, start + 28)
        found.append(Entry(kind, architecture, start, header + size))
        start += header + size
    return found if start == end else []


def used(entries: list[Entry], architecture: int) -> list[Entry]:
    """What the driver may load: cubins of the architecture, else PTX that it can compile, else the smallest entry.

    A fatbin for other GPUs alone keeps an entry, because an empty fatbin is an error when the library is loaded.
    """
    cubins = [e for e in entries if e.kind == CUBIN and e.architecture == architecture]
    ptx = [e for e in entries if e.kind == PTX and e.architecture <= architecture]
    return cubins or ptx or [min(entries, key=lambda e: e.size)]


def is_of(library: bytes, entry: Entry, sources: str) -> bool:
    """Whether the code was compiled from one of these files: nvcc writes the name into internal symbols."""
    name = rf"_INTERNAL_[0-9a-f]{{8}}_[0-9]+_({sources})_cu_".encode()
    return re.search(name, library[entry.start : entry.start + entry.size]) is not None
