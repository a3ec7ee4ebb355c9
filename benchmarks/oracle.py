"""A drafter that knows the texts, so that trees are accepted as often as wanted, whatever the target."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree


@dataclass(frozen=True)
class Known:
    row: Tensor  # (B,) which text
    lengths: Tensor  # (B,) tokens decided


class OracleDrafter:
    """Knows the texts. Right with probability `skill` at each guess; candidates 1.. are noise."""

    layers: tuple[int, ...] = ()
    default_shape = Shape(width=3, length=4)

    def __init__(self, prompts: list[list[int]], texts: list[list[int]], skill: float, vocab: int = 40) -> None:
        whole = [p + t for p, t in zip(prompts, texts, strict=True)]
        width = max(len(w) for w in whole) + 64
        self.truth = torch.tensor([w + [0] * (width - len(w)) for w in whole])
        self.skill, self.vocab = skill, vocab
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Known:
        n = min(tokens.shape[1], self.truth.shape[1])
        real = torch.arange(n) < lengths[:, None, None]  # (B, 1, n)
        same = (tokens[:, None, :n] == self.truth[None, :, :n]) | ~real  # (B, texts, n)
        return Known(same.all(-1).int().argmax(-1), lengths)

    def draft(self, state: Known, last: Tensor, search: Search) -> Tree:
        width, length = search.shape.width, search.shape.length
        where = state.lengths[:, None] + torch.arange(length)
        truth = self.truth[state.row].gather(1, where)
        right = torch.rand(truth.shape, generator=self.generator) < self.skill
        first = torch.where(right, truth, (truth + 1) % self.vocab)
        others = torch.randint(self.vocab, (len(last), width - 1, length), generator=self.generator)
        if width > 2:  # a sibling of the truth at the last depth
            others[:, 0, :-1] = first[:, :-1]
        beam = torch.cat([first[:, None], others], 1)
        scores = -torch.arange(width, dtype=torch.float64)[:, None] - torch.arange(length) / 10
        return search.candidates(beam, scores.expand(beam.shape), last)

    def advance(self, state: Known, accepted: Accepted, hidden: Tensor) -> Known:
        return Known(state.row, state.lengths + accepted.count)

    def keep(self, state: Known, rows: Tensor) -> Known:
        return keep_rows(state, rows)
