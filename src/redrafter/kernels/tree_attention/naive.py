"""Attention of tree nodes over the KV cache and over each other: the oracle, and the format of the packed mask."""

import torch
from torch import Tensor

LENGTH, DEPTH, WINDOW, PLACE, SLOTS = range(5)
"""Columns of a packed mask; from SLOTS on, the slots of a tree node's newest keys."""
EVERYTHING = 1 << 40
"""The window size of full attention."""
NEWEST = 16
"""A node's newest keys, its own included. Nodes of a tree that is less deep get the bits of plain decoding on a GPU."""


def newest_for(deep: int) -> int:
    """How many of a node's keys are its newest, in a tree of this depth: a power of two.

    >>> [newest_for(deep) for deep in (1, 15, 16)]
    [16, 16, 32]
    """
    return max(NEWEST, 1 << deep.bit_length())


def newest_of(packed: Tensor) -> int:
    """`newest_for` of the tree that a mask was packed for; 0 for a chain."""
    return packed.shape[-1] - SLOTS


def pack_mask(
    lengths: Tensor,
    depths: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    places: Tensor | None = None,
    deep: int = NEWEST - 1,
) -> Tensor:
    """(B,) lengths, (B, n) depths, (B, n, n) ancestors -> (B, 1, n, 4 + newest) int64.

    What each node sees, in a few words. A node at position p = length + depth sees all keys up to p - newest in its
    row's place in the cache (`places` (B,), by default 0, 1, ...), where slots are positions. The last columns have the
    slots of the newest keys, up to p: those of the text, then those of the nodes on its path; -1 is no key. The window
    cuts both off. No node is deeper than `deep`. Without ancestors the nodes are a chain: node j has depth j and sees
    all before it, and there are no slots. The mask has four axes because transformers passes such a mask to attention
    unchanged.

    >>> two = torch.tensor([[[1, 0], [1, 1]]]).bool()
    >>> pack_mask(torch.tensor([7]), torch.tensor([[0, 1]]), two, window=5)[0, 0, 1].tolist()
    [7, 1, 5, 0, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    batch, n = depths.shape
    length = lengths[:, None].expand(batch, n)
    reach = torch.full_like(depths, EVERYTHING if window is None else window)
    places = torch.arange(batch, device=depths.device) if places is None else places
    about = torch.stack([length, depths, reach, places[:, None].expand(batch, n)], dim=-1)
    if mask is None:
        return about[:, None]
    level = depths[..., None] + torch.arange(1 - newest_for(deep), 1, device=depths.device)  # (B, n, newest)
    on_path = mask[:, :, None] & (depths[:, None, None] == level[..., None])  # (B, n, newest, n)
    node = torch.where(on_path.any(-1), lengths[:, None, None] + on_path.int().argmax(-1), -1)
    return torch.cat([about, torch.where(level < 0, length[..., None] + level, node).clamp(min=-1)], dim=-1)[:, None]


def visible(packed: Tensor, slots: int) -> Tensor:
    """(B, 1, n, ...) -> (B, n, S): which slots each node sees; the tree is in the slots from the row's length on."""
    packed = packed[:, 0]
    position = packed[..., LENGTH] + packed[..., DEPTH]  # (B, n)
    back = position[..., None] - torch.arange(slots, device=packed.device)  # (B, n, S)
    newest = packed[..., SLOTS:]
    seen = (back >= newest.shape[-1]) & (back < packed[..., WINDOW, None])
    if newest.shape[-1] == 0:
        return seen
    near = torch.arange(newest.shape[-1] - 1, -1, -1, device=packed.device) < packed[..., WINDOW, None]
    listed = torch.where(near & (newest >= 0), newest, slots)  # a column of its own for what is not seen
    return torch.nn.functional.pad(seen, (0, 1)).scatter(2, listed, True)[..., :slots]


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, packed: Tensor) -> None:
    """Write nodes' keys and values (B, K, n, D) to the cache (P, K, S, D), in their row's slots from its length on."""
    slots = packed[:, 0, :, LENGTH] + torch.arange(packed.shape[2], device=packed.device)  # (B, n)
    places = packed[:, 0, :1, PLACE]
    for whole, new in ((keys, key), (values, value)):
        whole[places, :, slots] = new.transpose(1, 2)


def attend(query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, scaling: float) -> Tensor:
    """Queries (B, n, G·K, D) of n nodes on the cache (P, K, S, D) -> (B, n, G·K, D).

    The cache already holds the nodes' own keys and values, in their row's slots from its length on.
    """
    batch, n, heads, size = query.shape
    groups = heads // keys.shape[1]
    places = packed[:, 0, 0, PLACE]
    keys, values = keys[places], values[places]
    seen = visible(packed, keys.shape[2])[:, None, None]  # (B, 1, 1, n, S)
    grouped = query.transpose(1, 2).reshape(batch, -1, groups, n, size).float()
    scores = torch.einsum("bkgnd,bksd->bkgns", grouped, keys.float()) * scaling
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    # slots that were never written have weight 0
    out = torch.einsum("bkgns,bksd->bkgnd", weights, values.float().nan_to_num())
    return out.reshape(batch, heads, n, size).transpose(1, 2).to(query.dtype)
