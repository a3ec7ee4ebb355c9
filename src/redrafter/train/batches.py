"""Which texts and positions an update learns from. It depends only on the seed and the number of the update."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from redrafter.drafters.training import TrainingBatch
from redrafter.texts import Texts

POOL = 64
"""Updates whose texts are sorted by length together, so that texts of a batch are about equally long."""


def count_positions(texts: Texts, rows: Tensor | Sequence[int] | None = None) -> Tensor:
    """(R,) positions of each text: from the one that chose the answer's first token, while a guess can be checked.

    Without rollouts the last answer token has no successor to guess.
    """
    where = slice(None) if rows is None else torch.as_tensor(rows, dtype=torch.long)
    lengths = texts.starts[1:][where] - texts.starts[:-1][where]
    return (lengths - texts.prompts[where] - int(texts.rollouts is None)).clamp(min=0)


def make_batch(texts: Texts, rows: Sequence[int]) -> TrainingBatch:
    """Pad texts and list their positions.

    >>> texts = Texts.of([[5, 6, 7, 8, 9], [1, 2, 3]], [2, 1], [0.0, 0.0], [0, 0])
    >>> batch = make_batch(texts, [0, 1])
    >>> batch.row.tolist(), batch.at.tolist(), batch.left.tolist()
    ([0, 0, 1], [1, 2, 0], [2, 1, 1])
    """
    chosen = torch.as_tensor(rows)
    starts, prompts = texts.starts[chosen], texts.prompts[chosen]
    lengths = texts.starts[chosen + 1] - starts
    place = torch.arange(int(lengths.max()))
    real = place < lengths[:, None]
    flat = torch.where(real, starts[:, None] + place, 0)
    tokens = torch.where(real, texts.tokens[flat].long(), 0)
    counts = count_positions(texts, chosen)
    row = torch.arange(len(chosen)).repeat_interleave(counts)
    within = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    at = prompts[row] - 1 + within
    first, most = prompts - 1, int(counts.max())
    if texts.rollouts is None:
        return TrainingBatch(tokens, lengths, row, at, lengths[row] - 2 - at, first, most)
    rollouts = texts.rollouts[starts[row] + at].long()
    return TrainingBatch(tokens, lengths, row, at, torch.full_like(row, rollouts.shape[1] - 1), first, most, rollouts)


def epoch_groups(
    texts: Texts, rows: Tensor, positions: int, together: int, seed: int, epoch: int, least: int = 1
) -> list[list[list[int]]]:
    """One pass over `rows` as updates of about `positions` positions each, in an order of its own.

    Updates come in groups of `together` whose texts are about equally long, so that one pass of the target
    serves them all. An update has `least` texts or more: one for each process.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = rows[torch.randperm(len(rows), generator=generator)]
    counts = count_positions(texts)
    order = order[counts[order] > 0]
    groups: list[list[list[int]]] = []
    pool = max(1, POOL * positions // max(1, int(counts[order].float().mean())) if len(order) else 1)
    for part in torch.split(order, pool):
        by_length = part[texts.lengths[part].argsort(stable=True)]
        filled = 0
        current: list[int] = []
        made: list[list[int]] = []
        for index, n in zip(by_length.tolist(), counts[by_length].tolist(), strict=True):
            if current and filled + n > positions * together:
                made.append(current)
                filled, current = 0, []
            current.append(index)
            filled += n
        made.append(current)
        if len(current) < least and len(made) > 1:
            made[-2] += made.pop()
        for i in torch.randperm(len(made), generator=generator).tolist():
            mixed = torch.tensor(made[i])[torch.randperm(len(made[i]), generator=generator)].tolist()
            split = max(1, min(together, len(mixed) // least))
            groups.append([mixed[k::split] for k in range(split)])
    return groups


def all_groups(
    texts: Texts, rows: Tensor, positions: int, together: int, seed: int, start: int, least: int = 1
) -> Iterator[tuple[list[list[int]], int]]:
    """Groups from the one that holds update `start` on, without end; with each, how many updates to skip."""
    done, epoch = 0, 0
    while True:
        for group in epoch_groups(texts, rows, positions, together, seed, epoch, least):
            if done + len(group) > start:
                yield group, max(0, start - done)
            done += len(group)
        epoch += 1


def sum_positions(texts: Texts, rows: Sequence[int]) -> int:
    return max(1, int(count_positions(texts, rows).sum()))


def micro_batches(texts: Texts, rows: list[int], positions: int) -> list[list[int]]:
    """Rows in groups of at most so many positions, but at least one row."""
    parts: list[list[int]] = []
    filled = 0
    for row, n in zip(rows, count_positions(texts, rows).tolist(), strict=True):
        if not parts or filled + n > positions:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += n
    return parts
