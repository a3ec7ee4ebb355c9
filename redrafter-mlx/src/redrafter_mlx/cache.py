"""The KV cache: what mlx-lm's models read and write in place of their own, for trees and for rows of any length.

Slot i of a row holds its i-th token. A pass writes its tokens behind the longest row, in the same slots for all rows;
`commit` then moves each row's accepted path right behind that row's own tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from redrafter_mlx.tree import Tree


class LayerCache:
    """Keys and values (B, K, S, D) of one layer, stored by mlx-lm's own cache."""

    def __init__(self, cache: "TreeCache", window: int | None) -> None:
        self.cache, self.window, self.stored = cache, window, KVCache()

    @property
    def offset(self) -> int | mx.array:
        return self.cache.offset

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.cache.mask(count, window_size or self.window, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored.offset = self.cache.start
        return self.stored.update_and_fetch(keys, values)

    def change(self, how: Callable[[mx.array], mx.array]) -> None:
        """Replace the keys and the values."""
        if self.stored.keys is not None:
            self.stored.keys, self.stored.values = how(self.stored.keys), how(self.stored.values)


class TreeCache:
    """The caches of all layers, how long each row is, and what the current pass sees.

    `windows`: the sliding window of each layer, None for full attention. `shift`: the position of slot 0, which only
    the self-check sets.
    """

    def __init__(self, windows: Sequence[int | None], lengths: Sequence[int] = (0,), shift: int = 0) -> None:
        self.lengths, self.shift = list(lengths), shift
        self.layers = [LayerCache(self, window) for window in windows]
        self.tree: Tree | None = None  # what the current pass verifies; None: neighbouring tokens of one row

    @property
    def state(self) -> list[mx.array]:
        return [x for layer in self.layers for x in (layer.stored.keys, layer.stored.values) if x is not None]

    @property
    def start(self) -> int:
        """The first slot of the current pass."""
        return max(self.lengths)

    @property
    def offset(self) -> int | mx.array:
        """The position of the pass's first token, or (B, n) the position of each tree node."""
        if self.tree is None:
            return self.start + self.shift
        return mx.array(self.lengths)[:, None] + self.tree.depths + self.shift

    def mask(self, count: int, window: int | None, as_array: bool) -> Any:
        """Which slots each of the pass's `count` tokens sees, in the form that mlx-lm's attention takes."""
        if self.tree is None:
            return create_attention_mask(count, self.start, as_array, window)
        return self._tree_mask(self.tree, window)

    def _tree_mask(self, tree: Tree, window: int | None) -> mx.array:
        """(n, S) for one row, (B, 1, n, S) for more: the row's own tokens and the node's ancestors.

        A sliding window counts positions, not slots.
        """
        batch, n = tree.tokens.shape
        lengths, slot = mx.array(self.lengths)[:, None], mx.arange(self.start)
        text = mx.broadcast_to((slot < lengths)[:, None], (batch, n, self.start))
        seen = mx.concatenate([text, tree.mask], axis=-1)
        if window is not None:
            nodes = lengths + tree.depths
            slots = mx.concatenate([mx.broadcast_to(slot, (batch, self.start)), nodes], axis=1)
            seen = seen & (nodes[:, :, None] - slots[:, None] < window)
        return seen[0] if batch == 1 else seen[:, None]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Move each row's path of tree nodes, in order, right behind the row's own tokens.

        Sources and destinations overlap, so all of them are read before any is written.
        """
        count = max(len(path) for path in paths)  # a shorter path repeats its last move
        rows = list(zip(paths, self.lengths, strict=True))
        sources = [[self.start + path[min(i, len(path) - 1)] for i in range(count)] for path in paths]
        places = [[length + min(i, len(path) - 1) for i in range(count)] for path, length in rows]
        if sources != places:
            source, destination = (mx.array(slots)[:, None, :, None] for slots in (sources, places))
            for layer in self.layers:
                layer.change(lambda stored: moved(stored, source, destination))
        self.lengths = [length + len(path) for path, length in rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        at = mx.array(list(rows))
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.change(lambda stored: stored[at])


def moved(stored: mx.array, source: mx.array, destination: mx.array) -> mx.array:
    """(B, K, S, D) with the slots `source` (B, 1, m, 1) copied to `destination`."""
    shape = (stored.shape[0], stored.shape[1], source.shape[2], stored.shape[3])
    found = mx.take_along_axis(stored, mx.broadcast_to(source, shape), axis=2)
    return mx.put_along_axis(stored, mx.broadcast_to(destination, shape), found, axis=2)
