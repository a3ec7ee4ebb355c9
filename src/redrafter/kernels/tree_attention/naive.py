"""Attention of tree nodes over the KV cache and over each other: the oracle, and the format of the packed mask."""

import torch
from torch import Tensor

LENGTH, DEPTH, WINDOW, PLACE, BITS = range(5)
"""Columns of a packed mask; from BITS on, each column has one bit for each of 64 nodes."""
EVERYTHING = 1 << 40
"""The window size of full attention."""
NEWEST = 16
"""The largest depth of a tree whose nodes get the bits of plain decoding from the GPU's kernel."""


def pack_mask(
    lengths: Tensor,
    depths: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """(B,) lengths, (B, n) depths, (B, n, n) ancestors -> (B, 1, n, 4 + words) int64.

    What each node sees, in a few words: the first `length` slots of its row's place in the cache (`places` (B,), by
    default 0, 1, ...) and the nodes whose bits are set, as far back as the window reaches. Without ancestors the nodes
    are a chain: node j has depth j, and sees all nodes before it. The mask has four axes because transformers passes
    such a mask to attention unchanged.

    >>> pack_mask(torch.tensor([7]), torch.tensor([[0, 1]]), torch.tensor([[[1, 0], [1, 1]]]).bool(), 5).tolist()
    [[[[7, 0, 5, 0, 1], [7, 1, 5, 0, 3]]]]
    """
    batch, n = depths.shape
    length = lengths[:, None].expand(batch, n)
    reach = torch.full_like(depths, EVERYTHING if window is None else window)
    places = torch.arange(batch, device=depths.device) if places is None else places
    about = torch.stack([length, depths, reach, places[:, None].expand(batch, n)], dim=-1)
    if mask is None:
        return about[:, None]
    words = -(-n // 64)
    spread = torch.nn.functional.pad(mask, (0, 64 * words - n)).view(batch, n, words, 64)
    bits = (spread.long() << torch.arange(64, device=mask.device)).sum(-1)  # bit 63 is the sign
    return torch.cat([about, bits], dim=-1)[:, None]


def visible(packed: Tensor, slots: int) -> Tensor:
    """(B, 1, n, ...) -> (B, n, S): which slots each node sees; the tree is in the slots from the row's length on."""
    packed = packed[:, 0]
    n = packed.shape[1]
    length, depths = packed[:, :1, LENGTH], packed[..., DEPTH]  # (B, 1), (B, n)
    slot = torch.arange(slots, device=packed.device)
    node = slot - length  # (B, S) index of the node in each slot; out of range: none
    cached, in_tree = (node < 0)[:, None], ((node >= 0) & (node < n))[:, None]
    node = node.clamp(0, n - 1)
    if packed.shape[-1] == BITS:
        above = node[:, None] <= depths[..., None]
    else:
        word = packed[..., BITS:].gather(2, (node // 64)[:, None].expand(-1, n, -1))
        above = (word >> (node % 64)[:, None]) & 1 == 1
    position = torch.where(cached[:, 0], slot, length + depths.gather(1, node))
    near = (length + depths)[:, :, None] - position[:, None] < packed[..., WINDOW, None]
    return (cached | (in_tree & above)) & near


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
