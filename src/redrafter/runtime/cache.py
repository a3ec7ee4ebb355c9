"""The KV cache of the running batch: one allocation for all layers, so that one kernel commits them all."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.kernels.commit import commit
from redrafter.targets import Target


class Arena(KVCache):
    """Room for `rows` rows of `slots` slots, allocated before anything is written."""

    def __init__(self, target: Target, rows: int, slots: int) -> None:
        super().__init__(slots)
        self.rows = rows
        layers = target.kv_layout()
        kinds = {kind for pair in layers.values() for kind in pair}
        self.whole: Tensor | None = None
        for layer, states in target.state_of_row().layers.items():
            room = {name: lazy_zeros((rows, *x.shape[1:]), x.dtype, x.device) for name, x in states.items()}
            self.recurrent.layers[layer] = room
        self._parts: dict[tuple[int, int], tuple[dict[int, tuple[Tensor, Tensor]], Tensor | None, dict[str, Any]]] = {}
        if len(kinds) == 1:
            heads, size, dtype, device = kinds.pop()
            self.whole = lazy_zeros((len(layers), 2, rows, heads, slots, size), dtype, device)
            self.layers = {layer: (self.whole[i, 0], self.whole[i, 1]) for i, layer in enumerate(layers)}
        else:  # a model whose layers, or whose keys and values, differ
            for layer, pair in layers.items():
                k, v = (lazy_zeros((rows, h, slots, d), dtype, on) for h, d, dtype, on in pair)
                self.layers[layer] = (k, v)

    def part(self, start: int, stop: int) -> KVCache:
        if (start, stop) not in self._parts:  # the tensors never move, and slicing all layers takes a while
            layers = {layer: (k[start:stop], v[start:stop]) for layer, (k, v) in self.layers.items()}
            self._parts[start, stop] = (layers, None if self.whole is None else self.whole[:, :, start:stop], {})
        layers, whole, stays = self._parts[start, stop]
        made = Arena.__new__(Arena)  # `copy.copy` takes as long as a tensor operation
        made.__dict__.update(self.__dict__, layers=dict(layers), whole=whole, stays=stays, _parts={})
        made.recurrent = self.recurrent.part(start, stop)
        return made

    def row_first(self) -> list[Tensor]:
        """Keys and values as (rows, ..., S, D): one tensor where all layers are alike."""
        return list(self.tensors()) if self.whole is None else [self.whole.movedim(2, 0)]

    def commit(self, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        if self.whole is None:
            super().commit(lengths, path, count)
        else:
            self.recurrent.commit(path, count)
            commit(self.whole, lengths, path)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the operating system gives each page when it is first written; torch would write all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    start = -room.data_ptr() % 64
    return room[start : start + size].view(dtype).view(shape)
