"""A KV cache that never moves: all layers in one tensor, so that one kernel commits them all."""

import copy

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.kernels.commit import commit
from redrafter.targets import Target


class Arena(KVCache):
    """Room for `rows` rows of `slots` slots, made before anything is written."""

    def __init__(self, target: Target, rows: int, slots: int) -> None:
        super().__init__(slots)
        sample = KVCache(slots=1)  # one token shows what each layer keeps
        target.prefill(torch.zeros(1, 1, dtype=torch.long, device=target.device), [1], sample, ())
        kinds = {(x.shape[1], x.shape[3], x.dtype, x.device) for x in sample.tensors()}
        self.whole: Tensor | None = None
        if len(kinds) == 1:
            heads, size, dtype, device = kinds.pop()
            shape = (len(sample.layers), 2, rows, heads, slots, size)
            self.whole = torch.zeros(shape, dtype=dtype, device=device)
            self.layers = {layer: (self.whole[i, 0], self.whole[i, 1]) for i, layer in enumerate(sample.layers)}
        else:  # models whose layers differ
            for layer, pair in sample.layers.items():
                k, v = (x.new_zeros(rows, x.shape[1], slots, x.shape[3]) for x in pair)
                self.layers[layer] = (k, v)

    def part(self, start: int, stop: int) -> KVCache:
        """Rows start..stop-1, in the same memory."""
        made = copy.copy(self)
        made.layers = {layer: (k[start:stop], v[start:stop]) for layer, (k, v) in self.layers.items()}
        # One kernel for all layers is a GPU's; a CPU moves layer by layer.
        on_gpu = self.whole is not None and self.whole.is_cuda
        made.whole = self.whole[:, :, start:stop] if on_gpu and self.whole is not None else None
        return made

    def commit(self, lengths: Tensor, path: Tensor) -> None:
        if self.whole is None:
            super().commit(lengths, path)
        else:
            commit(self.whole, lengths, path)
