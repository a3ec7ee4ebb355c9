"""Tensors that other projects keep in a pickle of `torch.save`: tensors alone are read, and no code is run."""

import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from redrafter.drafters import files
from redrafter.errors import CorruptCheckpoint, first_line

MOST_PROGRAM = 2**20
"""Bytes of the pickle itself, beside the numbers of its tensors."""
SHARED = 2
"""Bytes of tensors for each byte of the file, at most."""
ZIP = b"PK\x03\x04"
"""How a file begins that torch does not take for a pickle alone."""


def read(path: Path, most: int) -> dict[str, Tensor]:
    """The tensors of a file of at most `most` bytes, by name, in fp32 and finite; a bare tensor has the name ""."""
    try:
        files.check_regular(path)
        size = path.stat().st_size
        if size > most:
            raise ValueError(f"it is larger than {most >> 20} MiB")
        _check_parts(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions of the pickle
            found = torch.load(path, map_location="cpu", weights_only=True)
        tensors = found if isinstance(found, dict) else {"": found}
        if not all(isinstance(name, str) and isinstance(each, Tensor) for name, each in tensors.items()):
            raise ValueError("it must hold tensors by name, and nothing else")
        # A view of few numbers can have any shape. Layers that are the same one share theirs.
        if sum(each.numel() * each.element_size() for each in tensors.values()) > SHARED * size:
            raise ValueError("its tensors are larger than the file")
        return files.finite({name: each.detach() for name, each in tensors.items()}, path)
    except CorruptCheckpoint:
        raise
    except Exception as error:  # torch raises many kinds
        raise CorruptCheckpoint(f"cannot read {path}: {first_line(error)}") from error


def _check_parts(path: Path) -> None:
    """Compressed parts unpack to any size, and in a pickle an array of bytes has any."""
    with path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:  # torch would unpickle it whole, whatever stands behind it
            raise ValueError("it is not in the format that torch.save writes since version 1.6")
    with zipfile.ZipFile(path) as parts:
        if min((part.header_offset for part in parts.infolist()), default=0):
            raise ValueError("something stands before its first part")
        for part in parts.infolist():
            program = part.filename.endswith(".pkl")
            if (
                part.compress_type != zipfile.ZIP_STORED
                or (program and part.file_size > MOST_PROGRAM)
                or (program and b"bytearray" in parts.read(part))
            ):
                raise ValueError("it has parts that torch.save does not write for tensors")
