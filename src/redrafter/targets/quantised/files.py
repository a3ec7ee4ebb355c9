"""The safetensors files of a model's folder: what tensors they hold, checked against their sizes; read one by one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from redrafter.bounds import shown
from redrafter.errors import CorruptCheckpoint, ModelNotFound, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_INDEX = 2**26
"""Bytes of an index."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, which is read when it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    opened: Any

    def read(self) -> Tensor:
        try:
            tensor: Tensor = self.opened.get_tensor(self.name)
        except Exception as error:  # safetensors raises many kinds
            raise CorruptCheckpoint(f"cannot read {self.name} of {self.file} ({first_line(error)})") from error
        return tensor

    def wrong(self, problem: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.file}: {shown(self.name)} {problem}; copy it again")


class WeightFiles(Mapping[str, Stored]):
    """All tensors of a folder, by name. The files stay open, and their pages are read when needed."""

    def __init__(self, folder: Path) -> None:
        self.files = shards(folder)
        self._tensors: dict[str, Stored] = {}
        for file in self.files:
            for stored in tensors_of(file):
                if stored.name in self._tensors:
                    raise stored.wrong(f"is in {self._tensors[stored.name].file.name} too")
                self._tensors[stored.name] = stored

    def __getitem__(self, name: str) -> Stored:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def shards(folder: Path) -> list[Path]:
    """The files with a model's weights, in the order of their names."""
    index = folder / INDEX
    names = [SINGLE]
    if index.exists():
        try:
            if not index.is_file() or index.stat().st_size > MOST_INDEX:  # a pipe would never end
                raise ValueError(f"it is no file of at most {MOST_INDEX >> 20} MiB")
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{index} is no index of weights ({first_line(error)}); copy it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptCheckpoint(f"{index} names {shown(name)}, which is no safetensors file of its folder")
        if not (folder / name).is_file():
            raise ModelNotFound(f"{folder} has no file {name}: its weights must be safetensors files")
    return [folder / name for name in names]


def tensors_of(file: Path) -> Iterator[Stored]:
    """The tensors of one file."""
    try:
        opened: Any = safe_open(file, framework="pt")  # checks the header against the size of the file
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            part = opened.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CorruptCheckpoint(
                    f"{file}: {shown(name)} has the type {part.get_dtype()}, which is not supported"
                )
            yield Stored(name, tuple(part.get_shape()), dtype, file, opened)
    except CorruptCheckpoint:
        raise
    except Exception as error:  # safetensors raises many kinds
        raise CorruptCheckpoint(f"cannot read {file} ({first_line(error)}); copy it again") from error
