"""The lines of rows' trees in a flat pass, in plain torch: the oracle."""

import torch
from torch import Tensor

from redrafter.kernels.tree_attention.naive import EVERYTHING, NEWEST, padding


def flatten(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    real: Tensor,
    lengths: Tensor,
    places: Tensor,
    longest: int,
    lines: Tensor,
    runs: Tensor,
    begin: int,
) -> Tensor:
    """Write the lines of trees' real nodes (B, n), row by row -> each node's line (B, n), a dropped node's root's.

    Node j of a row stands in slot length + j, whatever other nodes are dropped; the root is always real. Lines from
    `begin` on and `runs` (B, 2) are overwritten; lines behind the last node become padding. `longest` is the largest
    rotary position of the model.
    """
    batch, n = tokens.shape
    node = torch.arange(n, device=tokens.device)
    counts = real.sum(1)
    first = begin + counts.cumsum(0) - counts
    at = torch.where(real, first[:, None] + real.cumsum(1) - 1, first[:, None])
    index = lengths[:, None] + depths
    level = depths[..., None] + torch.arange(1 - NEWEST, 1, device=tokens.device)  # (B, n, NEWEST)
    on_path = mask[:, :, None] & (depths[:, None, None] == level[..., None])  # (B, n, NEWEST, n)
    above = torch.where(on_path.any(-1), lengths[:, None, None] + on_path.int().argmax(-1), -1)
    newest = torch.where(level < 0, lengths[:, None, None] + level, above).clamp(min=-1)
    about = [
        tokens,
        index.clamp(max=longest),
        index,
        torch.full_like(tokens, EVERYTHING),
        places[:, None].expand(batch, n),
        lengths[:, None] + node,
    ]
    lines[begin:] = padding(len(lines) - begin, lines.device)
    lines[at[real]] = torch.cat([torch.stack(about, -1), newest], -1)[real]
    runs[:, 0], runs[:, 1] = first, counts
    return at
