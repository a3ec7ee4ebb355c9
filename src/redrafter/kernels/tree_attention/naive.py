"""Attention of a flat pass over the KV cache: the oracle, and the format of the pass's lines.

A pass reads T tokens of any mixture of rows: the last token of a row, the nodes of its tree, a piece of its prompt.
Each token has a line, which says where the token stands and what it sees. Tokens of the same row are neighbours: a run.
"""

import torch
from torch import Tensor

TOKEN, POSITION, INDEX, WINDOW, PLACE, SLOT, SLOTS = range(7)
"""Columns of a line: the token's id; its rotary position; how many tokens of its text come before it; the window of its
attention; its row's place in the KV cache; the slot of its key, -1 for padding; from SLOTS on, the slots of its newest
keys."""
EVERYTHING = 1 << 40
"""The window of full attention."""
NEWEST = 16
"""A token's newest keys, its own included: read slot by slot. All older keys are in the slots of their indices."""
DEEPEST = NEWEST - 1
"""Depth of the deepest node that a tree may have: all keys above it are among its newest."""
COLUMNS = SLOTS + NEWEST


def padding(count: int, device: torch.device | str = "cpu", newest: int = NEWEST) -> Tensor:
    """(count, COLUMNS) lines of no token: such a line is in no run, sees nothing and writes no key.

    newest: how many newest keys a line has room for. The pass of a CPU takes any number.
    """
    lines = torch.zeros(count, SLOTS + newest, dtype=torch.long, device=device)
    lines[:, WINDOW] = EVERYTHING
    lines[:, SLOT:] = -1
    return lines


def visible(lines: Tensor, slots: int) -> Tensor:
    """(T, COLUMNS) -> (T, S): which slots of its place each token sees.

    A node below the root of a text of 20 tokens, in slot 23; what is between them are nodes of other paths:

    >>> line = padding(1)
    >>> line[0, INDEX], line[0, SLOT], line[0, SLOTS:] = 21, 23, torch.tensor([*range(6, 21), 23])
    >>> visible(line, 25)[0].nonzero()[:, 0].tolist()[-4:]
    [18, 19, 20, 23]
    """
    back = lines[:, INDEX, None] - torch.arange(slots, device=lines.device)  # (T, S)
    window = lines[:, WINDOW, None]
    seen = (back >= NEWEST) & (back < window)
    near = torch.arange(NEWEST - 1, -1, -1, device=lines.device) < window
    newest = lines[:, SLOTS:]
    listed = torch.where(near & (newest >= 0), newest, slots)  # a column of its own for what is not seen
    seen = torch.nn.functional.pad(seen, (0, 1)).scatter(1, listed, True)[:, :slots]
    return seen & (lines[:, SLOT, None] >= 0)


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lines: Tensor) -> None:
    """Write the tokens' keys and values (T, K, D) to the cache (P, K, S, D). Padding writes nothing.

    Nothing here waits for the device: padding writes what some token writes, once more.
    """
    source = torch.where(lines[:, SLOT] >= 0, torch.arange(len(lines), device=lines.device), lines[:, SLOT].argmax())
    places, slots = lines[source, PLACE], lines[source, SLOT]
    for whole, new in ((keys, key), (values, value)):
        whole[places, :, slots] = new[source]


def attend(query: Tensor, keys: Tensor, values: Tensor, lines: Tensor, runs: Tensor, scaling: float) -> Tensor:
    """Queries (T, G·K, D) on the cache (P, K, S, D), which holds the tokens' keys -> (T, G·K, D), 0 for padding.

    `runs` (R, 2): the first line of each row's tokens, and how many there are.
    """
    kv_heads, size = keys.shape[1::2]
    seen = visible(lines, keys.shape[2])
    out = torch.zeros_like(query)
    for first, count in runs.tolist():
        if not count:
            continue
        some = slice(first, first + count)
        place = lines[first, PLACE]
        grouped = query[some].reshape(count, kv_heads, -1, size).float()
        scores = torch.einsum("nkgd,ksd->nkgs", grouped, keys[place].float()) * scaling
        weights = scores.masked_fill(~seen[some, None, None], -torch.inf).softmax(-1)
        # slots that were never written have weight 0
        result = torch.einsum("nkgs,ksd->nkgd", weights, values[place].float().nan_to_num())
        out[some] = result.flatten(1, 2).to(query.dtype)
    return out
