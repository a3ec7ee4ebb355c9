"""Refuses a configuration that asks for more weights than its files can hold, before memory is asked for."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from redrafter.errors import CorruptCheckpoint

MOST_LAYERS = 10_000
"""transformers makes lists of this length before it looks at any weight."""
A_BYTE = 8
"""Weights that a byte of a file can hold: one bit each."""


class Budget(TorchFunctionMode):
    """Modules that are made within it have at most so many weights in all."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.left = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty:  # what modules make their weights with
            sizes = args[0] if args and isinstance(args[0], Sequence) else args
            self.left -= math.prod(sizes)
            if self.left < 0:
                raise CorruptCheckpoint("its configuration describes more weights than its files hold")
        return func(*args, **(kwargs or {}))


def folder_budget(folder: Path) -> Budget:
    """For a folder of transformers' kind, after a look at its configuration."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = None  # transformers will say what is wrong
    for name, value in _numbers(config):
        if (name.endswith("layers") or name == "n_layer") and value > MOST_LAYERS:
            raise CorruptCheckpoint(f"its configuration has {name} = {value}, and at most {MOST_LAYERS} are possible")
    return Budget(A_BYTE * sum(file.stat().st_size for file in folder.iterdir() if file.is_file()))


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """The whole numbers of a configuration and of the configurations in it, by name."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, int):
            yield name, value
        yield from _numbers(value)
