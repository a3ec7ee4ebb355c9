"""One row of a running batch as the host knows it, and what a pass gave it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import SamplingParams
from redrafter.core.rows import keep_rows
from redrafter.core.sampling import Processor
from redrafter.core.tree import Tree
from redrafter.runtime.eager import Start


class Row:
    """A request's place in the pool. What the pool knows of it on the host."""

    def __init__(self, start: Start, params: SamplingParams, drafts: bool, logprobs: int | None, place: int) -> None:
        self.start, self.params, self.drafts, self.logprobs, self.place = start, params, drafts, logprobs, place
        self.ids = list(start.prompt)
        self.known = 0  # tokens in the cache
        self.seen = 0  # tokens that the drafter has taken in
        self.reused = 0  # of these, how many another row had read
        self.open, self.live, self.reuses = True, False, True
        self.used = 0
        self.processor: Processor | None = None
        self.error: Exception | None = None

    @property
    def shared(self) -> int:
        """Tokens whose hidden states are kept too: a plain row writes none for its own."""
        return self.known if self.drafts else min(self.known, len(self.start.prompt))


@dataclass(frozen=True)
class Written:
    """What a pass gave one row."""

    tokens: list[int]
    drafted: int = 0
    """Of the tokens, from the first on, how many were guessed."""
    done: bool = False
    nodes: int = 0
    tree: tuple[list[int], list[int], list[int]] | None = None
    """The tree's tokens, their parents, and the path through it, root first; None after a prompt."""
    logprobs: list[list[tuple[int, float]]] | None = None
    """Per token: itself and the most probable ones, with log-probabilities as the target gave them."""
    error: Exception | None = None
    """What a processor of this row raised."""


def each_its_own(rows: Sequence[Row | None]) -> Processor:
    """Each row's processor on its own nodes; what it raises is that row's alone."""

    def process(logits: Tensor, tree: Tree) -> Tensor:
        result = logits.clone()
        for i, row in enumerate(rows):
            if row is None or row.processor is None or row.error is not None:
                continue
            try:
                own = torch.tensor([i], device=logits.device)
                result[i] = row.processor(logits[i : i + 1], keep_rows(tree, own))[0]
            except Exception as error:
                row.error = error
        return result

    return process


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> list[list[tuple[int, float]]]:
    """(n, V) logits that n tokens were chosen from -> the token and the `top` most probable ones."""
    logp = logits.float().log_softmax(-1)
    best = logp.topk(top, dim=-1) if top else None
    found = []
    for i, token in enumerate(tokens):
        row = [(token, float(logp[i, token]))]
        if best is not None:
            row += list(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True))
        found.append(row)
    return found


def common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning.

    >>> common([1, 2, 3], [1, 2, 4, 5]), common([], [1]), common([1, 2], [1, 2])
    (2, 0, 2)
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared in C, tokens in Python are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
