"""tokens/step on texts the target has already written: walk along them, guess, and see how far each guess holds.

Exact, since a lossless rule accepts just what the text says; and cheap, since one pass over a text gives all
the hidden states its walk needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted, walk
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.targets import Target
from redrafter.train.dataset import Texts

ROWS, CPU_ROWS = 128, 16
"""Texts walked at once: a CPU gains nothing from more, and pays for every place that only fills up."""


@dataclass(frozen=True)
class Walked:
    """One text, or sums over several."""

    tokens: int
    steps: int
    reached: tuple[int, ...]
    """reached[d]: steps that accepted more than d tokens."""

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: "Walked") -> "Walked":
        reached = tuple(a + b for a, b in zip(self.reached, other.reached, strict=True))
        return Walked(self.tokens + other.tokens, self.steps + other.steps, reached)


def simulate(target: Target, drafter: Drafter, texts: Texts, shape: Shape) -> Walked:
    """Over all texts."""
    every = [w for along in read_along(target, drafter.layers, texts) for w in along.walk(drafter, shape)]
    return sum(every, start=Walked(0, 0, (0,) * shape.length))


@torch.no_grad()
def read_along(target: Target, layers: tuple[int, ...], texts: Texts) -> Iterator["Along"]:
    """The texts, a few of about equal length at a time, with the hidden states that drafters of these layers need."""
    rows = ROWS if target.device.type == "cuda" else CPU_ROWS
    for part in torch.split(texts.lengths.argsort(stable=True), rows):
        yield Along(target, layers, texts, part.tolist())


class Along:
    """Texts to walk along, as often as one likes; `rows` says which of the texts these are."""

    def __init__(self, target: Target, layers: tuple[int, ...], texts: Texts, rows: list[int]) -> None:
        self.target, self.rows, self.texts = target, rows, texts.select(rows)
        device = target.device
        self.width = int(self.texts.lengths.max())
        tokens = torch.zeros(len(rows), self.width, dtype=torch.long)
        for place in range(len(rows)):
            own = self.texts.row(place)
            tokens[place, : len(own)] = own
        self.tokens = tokens.to(device)
        self.hidden = target.states(self.tokens, layers) if layers else torch.zeros(*tokens.shape, 0, device=device)
        params = [SamplingParams(temperature=t) for t in self.texts.temperatures.tolist()]
        self.sampling = Sampling.of(params, target.vocab_size, device)

    def _known(self, x: Tensor, where: Tensor) -> Tensor:
        """(B, S) or (B, S, C) at places (B, n)."""
        index = where.clamp(max=self.width - 1)
        return x.gather(1, index) if x.dim() == 2 else x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))

    @torch.no_grad()
    def walk(self, drafter: Drafter, shape: Shape) -> list[Walked]:
        """Each text, as `Engine` would count it: a text's first token belongs to its prompt's pass."""
        device, target, texts = self.target.device, self.target, self.texts
        lengths, at, seeds = (x.to(device) for x in (texts.lengths, texts.prompts, texts.seeds))
        rule = make_rule(RuleConfig(), shape, target.vocab_size, target.dtype)
        state = drafter.begin(self.tokens, at, self.hidden, self.width + shape.budget + 1)
        zero = torch.zeros_like(at)
        first = Accepted(zero[:, None], self._known(self.tokens, at[:, None]), zero + 1, zero, zero)
        state = drafter.advance(state, first, self._known(self.hidden, at[:, None] - 1))
        steps, reached = torch.zeros_like(at), at.new_zeros(len(texts), shape.length)
        depth = torch.arange(shape.length, device=device)
        # `at` is where each row's last token stands; the text's own last token is never guessed after.
        while bool((live := at < lengths - 1).any()):
            search = rule.search(self.sampling, seeds, at)
            tree = drafter.draft(state, self._known(self.tokens, at[:, None])[:, 0], search)
            place = at[:, None] + tree.depths
            hit = (tree.tokens == self._known(self.tokens, place)) & (place < lengths[:, None])
            accepted = walk(tree, self._known(self.tokens, place + 1), hit)
            count = torch.where(live, torch.minimum(accepted.count, lengths - 1 - at), 0)
            accepted = replace(accepted, count=count)
            along = at[:, None] + torch.arange(accepted.path.shape[1], device=device)
            state = drafter.advance(state, accepted, self._known(self.hidden, along))
            steps += live
            reached += torch.where(live, torch.minimum(accepted.drafted, count), 0)[:, None] > depth
            at = at + count
        gained = (texts.lengths - texts.prompts - 1).clamp(min=0).tolist()
        return [Walked(*row) for row in zip(gained, steps.tolist(), map(tuple, reached.tolist()), strict=True)]
