"""The lines of rows' trees on a CPU in numpy: for so few numbers, torch takes ten times as long."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.kernels.tree_attention.naive import (
    EVERYTHING,
    INDEX,
    NEWEST,
    PLACE,
    POSITION,
    SLOT,
    SLOTS,
    TOKEN,
    WINDOW,
    padding,
)

Array = np.ndarray[Any, Any]


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
    """As `naive.flatten`."""
    own = lines_of(tokens, depths, mask, real, lengths, longest, lines.shape[1] - SLOTS)
    own[:, PLACE] = places[own[:, PLACE]]
    end = begin + len(own)
    lines[begin:end] = own
    lines[end:] = padding(len(lines) - end, newest=lines.shape[1] - SLOTS)
    counts = real.sum(1)
    first = begin + counts.cumsum(0) - counts
    runs[:, 0], runs[:, 1] = first, counts
    return torch.where(real, begin + real.flatten().cumsum(0).view(real.shape) - 1, first[:, None])


def lines_of(
    tokens: Tensor, depths: Tensor, mask: Tensor, real: Tensor, lengths: Tensor, longest: int, newest: int = NEWEST
) -> Tensor:
    """The lines of trees' real nodes of the rows at the first places, with this many newest keys."""
    row, node = real.numpy().nonzero()
    text, depth = lengths.numpy()[row], depths.numpy()[row, node]
    index = text + depth
    lines = np.empty((len(row), SLOTS + newest), np.int64)
    lines[:, TOKEN] = tokens.numpy()[row, node]
    lines[:, POSITION] = np.minimum(index, longest)
    lines[:, INDEX] = index
    lines[:, WINDOW] = EVERYTHING
    lines[:, PLACE] = row
    lines[:, SLOT] = text + node
    keys = lines[:, SLOTS:]
    np.maximum(np.add(index[:, None], _back(newest), out=keys), -1, out=keys)
    if (depth != node).any():  # branches: a node's ancestors are not the nodes before it
        line, above = mask.numpy()[row, node].nonzero()
        back = depth[line] - depths.numpy()[row[line], above]
        near = back < newest
        keys[line[near], newest - 1 - back[near]] = (text[line] + above)[near]
    return torch.from_numpy(lines)


@functools.lru_cache(maxsize=64)
def _back(newest: int) -> Array:
    return np.arange(1 - newest, 1)
