"""The KV cache: one pair of tensors per layer, written by row, committed in place; beside it the recurrent memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from redrafter.core.recurrence import RecurrentMemory
from redrafter.kernels.commit import commit_layer


class KVCache:
    """Slot i of a row holds its i-th token. After the row's tokens come the slots of the tree being verified.

    A layer is allocated at its first write, with the head count, head size, dtype and device of the model's keys. So a
    `device_map` needs no special treatment.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.extent = slots  # attention reads this many slots; a runtime that knows all lengths may set fewer
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # each (B, K, S, D)
        self.recurrent = RecurrentMemory()
        self.stays: dict[str, Any] | None = None  # what a target keeps about tensors that never move

    def tensors(self) -> Iterator[Tensor]:
        for pair in self.layers.values():
            yield from pair

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, n, D) to slots (B, n) of a layer; return the whole layer."""
        if layer not in self.layers:
            room = [x.new_zeros(x.shape[0], x.shape[1], self.slots, x.shape[3]) for x in (keys, values)]
            self.layers[layer] = (room[0], room[1])
        stored = self.layers[layer]
        for whole, new in zip(stored, (keys, values), strict=True):
            whole.scatter_(2, _over_heads(slots, new), new)
        return stored

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots."""
        if slots <= self.slots:
            return
        for layer, pair in self.layers.items():
            grown = [x.new_zeros(x.shape[0], x.shape[1], slots, x.shape[3]) for x in pair]
            for new, old in zip(grown, pair, strict=True):
                new[:, :, : self.slots] = old
            self.layers[layer] = (grown[0], grown[1])
        self.slots = self.extent = slots

    def commit(self, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Move the tree nodes `path` (B, L+1) behind `lengths` (B,) tokens; the first `count` (B,) are accepted.

        Sources and destinations overlap, so the whole path is read before any of it is written. Other slots stay.
        """
        self.recurrent.commit(path, count)
        path = path.contiguous()
        for whole in self.tensors():
            commit_layer(whole, lengths.to(whole.device), path.to(whole.device))

    def part(self, start: int, stop: int) -> "KVCache":
        """Rows start..stop-1 of all layers, in the same memory."""
        made = KVCache(self.slots)
        made.extent = self.extent
        made.layers = {layer: (k[start:stop], v[start:stop]) for layer, (k, v) in self.layers.items()}
        made.recurrent = self.recurrent.part(start, stop)
        return made

    def place(self, other: "KVCache", rows: Tensor) -> None:
        """Copy the rows of another, shorter cache into `rows` of this one."""
        self.recurrent.place(other.recurrent, rows)
        for layer, pair in other.layers.items():
            for whole, new in zip(self.layers[layer], pair, strict=True):
                whole[rows.to(whole.device), :, : other.slots] = new

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.recurrent.keep(rows)
        for layer, (k, v) in self.layers.items():
            self.layers[layer] = (k[rows.to(k.device)], v[rows.to(v.device)])


def _over_heads(slots: Tensor, like: Tensor) -> Tensor:
    """(B, n) -> (B, K, n, D) on the device of `like`, as an index for gather and scatter."""
    return slots.to(like.device)[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def tree_visibility(lengths: Tensor, mask: Tensor, slots: int) -> Tensor:
    """Which of the first `slots` slots each tree node sees: the committed ones and its ancestors.

    `mask` (B, n, m) says which of m nodes each of n nodes sees; node j of a row of length t is in slot t + j.

    >>> mask = torch.tensor([[[1, 0], [1, 1]]]).bool()
    >>> tree_visibility(torch.tensor([2]), mask, 5)[0].int().tolist()
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    """
    _, n, m = mask.shape
    node = (
        torch.arange(slots, device=lengths.device) - lengths[:, None]
    )  # (B, S) index of the node in each slot; out of range: none
    index = node.clamp(0, m - 1)[:, None].expand(-1, n, -1)
    in_tree = mask.gather(2, index) & ((node >= 0) & (node < m))[:, None]
    return in_tree | (node < 0)[:, None]


def slot_positions(lengths: Tensor, depths: Tensor, slots: int) -> Tensor:
    """(B, S) position of the token in each slot: the slot's index, or length + depth for a tree node.

    Sliding windows count positions, not slots.
    """
    slot = torch.arange(slots, device=lengths.device).expand(lengths.shape[0], -1)
    node = slot - lengths[:, None]
    in_tree = lengths[:, None] + depths.gather(1, node.clamp(0, depths.shape[1] - 1))
    return torch.where(node < 0, slot, in_tree)
