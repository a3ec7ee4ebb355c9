"""Our KV cache, worn as a transformers `Cache`: same tensors, their interface."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from redrafter.core.cache import KVCache


class WornLayer(CacheLayerMixin):
    """One layer of it; made for one forward pass, so slots and extent are known."""

    is_compileable = True

    def __init__(self, kv: KVCache, layer: int, slots: Tensor, extent: int) -> None:
        super().__init__()
        self.kv, self.layer, self.slots, self.extent = kv, layer, slots, extent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the KV cache allocates when written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.kv.write(self.layer, key_states, value_states, self.slots)
        return keys[:, :, : self.extent], values[:, :, : self.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent, 0

    def get_seq_length(self) -> int:
        # Positions and masks are always given, so no model needs more than "something is here".
        return self.extent - self.slots.shape[1]

    def get_max_length(self) -> int:
        return self.kv.slots


class WornCache(Cache):
    """Writes go to `slots` (B, n) of each row; attention sees the first `extent` slots."""

    def __init__(self, kv: KVCache, layers: int, slots: Tensor, extent: int) -> None:
        super().__init__(layers=[WornLayer(kv, i, slots, extent) for i in range(layers)])
