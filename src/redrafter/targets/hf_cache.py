"""redrafter's KV cache behind the interface of a transformers `Cache`: the same tensors, no copies."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from redrafter.core.cache import KVCache
from redrafter.core.recurrence import TextPass, TreePass


class HFCacheLayer(CacheLayerMixin):
    """One layer of the KV cache, for one forward pass with known slots and extent."""

    is_compileable = True

    def __init__(self, kv: KVCache, layer: int, slots: Tensor, extent: int, length: int | None) -> None:
        super().__init__()
        self.kv, self.layer, self.slots, self.extent = kv, layer, slots, extent
        self.length = extent - slots.shape[1] if length is None else length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the KV cache allocates a layer when it is first written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.kv.write(self.layer, key_states, value_states, self.slots)
        return keys[:, :, : self.extent], values[:, :, : self.extent]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The keys (B, n, D) by which a layer with indexed attention selects -> those of all slots.

        The KV cache keeps them as one more layer, below the model's, whose values have no size.
        """
        keys = indexer_key_states[:, None]
        stored, _ = self.kv.write(-1 - self.layer, keys, keys[..., :0], self.slots)
        return stored[:, 0, : self.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent, 0

    def get_seq_length(self) -> int:
        # One number for rows of different lengths. A model gets positions and masks as arguments and must not
        # derive anything from this number; the self-check refuses a model that does.
        return self.length

    def get_max_length(self) -> int:
        return self.kv.slots


class HFCache(Cache):
    """For one forward pass: writes go to `slots` (B, n) of each row, attention reads the first `extent` slots.

    `length` is what the cache reports as its number of tokens. `order` says which token follows which, for layers
    with a recurrent state.
    """

    def __init__(
        self,
        kv: KVCache,
        layers: int,
        slots: Tensor,
        extent: int,
        length: int | None = None,
        order: TreePass | TextPass | None = None,
    ) -> None:
        Cache.__init__(self, layers=[HFCacheLayer(kv, i, slots, extent, length) for i in range(layers)])
        self.kv, self.order = kv, order

    def __len__(self) -> int:
        return len(self.layers)
