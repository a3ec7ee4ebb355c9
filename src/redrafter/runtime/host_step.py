"""One step on a CPU: `core.step.step` under the rule `seeded`, with what follows the target's choices in plain Python.

An operation on a tensor of a few numbers takes ten microseconds and more. The second half of a step has a hundred of
them, half as much time as a small model's pass. Rows with penalties take `core.step.step`: their counts are tensors.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule
from redrafter.core.rules.beam_search import BeamSearch, target_choices
from redrafter.core.rules.seeded import SeededRule
from redrafter.core.sampling import Sampling, node_logits
from redrafter.core.step import Rows, Verifier
from redrafter.core.tree import path_layout
from redrafter.runtime.result_line import line
from redrafter.runtime.state import assign
from redrafter.runtime.step_drafter import StepDrafter

CPU = torch.device("cpu")


def runs_on_host(rows: Rows, rule: Rule) -> bool:
    return rows.last.device.type == "cpu" and type(rule) is SeededRule and rows.counts is None


@dataclass(frozen=True)
class Walk:
    """What one row accepted: `core.accept.Accepted` on the host, without padding."""

    path: list[int]
    tokens: list[int]
    count: int
    done: bool


def host_step(
    rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: StepDrafter, verifier: Verifier
) -> tuple[list[list[int]], int]:
    """A step in place -> the rows' lines (result_line.py), and the width of the new tokens in them."""
    search = rule.search(sampling, rows.seeds, rows.lengths)
    assert isinstance(search, BeamSearch)
    tree = drafter.draft(rows.state, rows.last, search)
    logits, hidden = verifier.verify(tree, rows.lengths, cache, drafter.layers)
    choices = target_choices(search, tree, node_logits(logits, sampling, None, tree)).tolist()
    tokens, parents, valid = tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist()
    lengths, remaining, done, eos = (x.tolist() for x in (rows.lengths, rows.remaining, rows.done, rows.eos))
    walks = [
        cut(walked(*row), left, over, ends)
        for *row, left, over, ends in zip(choices, tokens, parents, valid, remaining, done, eos, strict=True)
    ]
    width = min(tree.length, tree.nodes) + 1  # empty nodes were trimmed, and a path needs a node for each depth
    straight = all(walk.path == list(range(len(walk.path))) for walk in walks)
    stays = straight and not cache.recurrent.nodes  # keys and values are where they belong, and there is nothing else
    path = None if stays else torch.tensor([padded(walk.path, width) for walk in walks])
    if path is not None:
        cache.commit(rows.lengths, path, torch.tensor([walk.count for walk in walks]))
        hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[2]))
    drafter.remember(hidden)
    verified = [sum(real) - 1 for real in valid]
    if drafter.follows is not None:
        found = accepted(walks, path, width, verified)
        assign(rows.state, drafter.follow(rows.state, found, hidden[:, :width]))
    write(rows.lengths, [n + walk.count for n, walk in zip(lengths, walks, strict=True)])
    write(rows.remaining, [n - walk.count for n, walk in zip(remaining, walks, strict=True)])
    write(rows.done, [walk.done for walk in walks])
    for i, walk in enumerate(walks):
        if walk.count:
            rows.last.numpy()[i] = walk.tokens[walk.count - 1]
    lines = []
    for walk, nodes, above, real in zip(walks, tokens, parents, verified, strict=True):
        counts = (walk.count, len(walk.path) - 1, int(walk.done), real)
        above = [parent if node <= real else -1 for node, parent in enumerate(above)]
        lines.append(line(counts, padded(walk.tokens, width), padded(walk.path, width), nodes, above))
    return lines, width


def walked(choice: list[int], tokens: list[int], parents: list[int], valid: list[bool]) -> tuple[list[int], list[int]]:
    """`core.accept.walk` for one row: the deepest path whose tokens are the target's choices, and the choices along it.

    >>> walked([5, 7, 0, 8], [4, 5, 6, 7], [0, 0, 1, 1], [True] * 4)  # 4 -> 5 -> {6, 7}; after 4: 5; after 5: 7
    ([0, 1, 3], [5, 7, 8])
    """
    depths = [0]  # -1: not reached
    deepest = 0
    for node in range(1, len(tokens)):
        parent = parents[node]
        hit = valid[node] and depths[parent] >= 0 and tokens[node] == choice[parent]
        depths.append(depths[parent] + 1 if hit else -1)
        if depths[node] > depths[deepest]:
            deepest = node
    path = [deepest]
    while path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    return path, [choice[node] for node in path]


def cut(found: tuple[list[int], list[int]], remaining: int, done: bool, eos: list[int]) -> Walk:
    """`core.step.cut` for one row: the path and its tokens, up to the row's budget or end-of-sequence token.

    >>> cut(([0, 1, 2], [5, 9, 6]), 8, False, [9, -1])
    Walk(path=[0, 1, 2], tokens=[5, 9, 6], count=2, done=True)
    """
    path, tokens = found
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    count = 0 if done else min(len(tokens), end + 1, remaining)
    return Walk(path, tokens, count, done or end < count or count == remaining)


def accepted(walks: list[Walk], path: Tensor | None, width: int, verified: list[int]) -> Accepted:
    """The walks as tensors, for a drafter."""
    if path is None:
        path = path_layout(width - 1, CPU)[0].expand(len(walks), -1)
    tokens = [padded(walk.tokens, width) for walk in walks]
    numbers = (tokens, [walk.count for walk in walks], [len(walk.path) - 1 for walk in walks], verified)
    return Accepted(path, *(torch.from_numpy(np.array(x)) for x in numbers))


def padded(values: list[int], width: int) -> list[int]:
    return values + [0] * (width - len(values))


def write(tensor: Tensor, values: list[int] | list[bool]) -> None:
    np.copyto(tensor.numpy(), values)
