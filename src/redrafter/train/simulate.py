"""tokens/step on texts the target has already written: walk along them, guess, and see how far each guess holds.

Exact, since a lossless rule accepts just what the text says; and cheap, since one pass over a text gives all
the hidden states its walk needs.
"""

from dataclasses import dataclass, replace

import torch

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted, walk
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.targets import Target
from redrafter.train.texts import Texts

ROWS = 128
"""Texts walked at once."""


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
    return sum(walks(target, drafter, texts, shape), start=Walked(0, 0, (0,) * shape.length))


@torch.no_grad()
def walks(target: Target, drafter: Drafter, texts: Texts, shape: Shape) -> list[Walked]:
    """Each text, as `Engine` would count it: a text's first token belongs to its prompt's pass."""
    found: list[Walked] = []
    for start in range(0, len(texts), ROWS):
        rows = range(start, min(start + ROWS, len(texts)))
        found += _walk(target, drafter, texts.select(list(rows)), shape)
    return found


def _walk(target: Target, drafter: Drafter, texts: Texts, shape: Shape) -> list[Walked]:
    device = target.device
    lengths, at = texts.lengths.to(device), texts.prompts.to(device)
    width = int(texts.lengths.max())
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    for row in range(len(texts)):
        own = texts.row(row)
        tokens[row, : len(own)] = own
    tokens = tokens.to(device)
    layers = drafter.layers
    hidden = target.states(tokens, layers) if layers else torch.zeros(*tokens.shape, 0, device=device)
    params = [SamplingParams(temperature=t) for t in texts.temperatures.tolist()]
    sampling = Sampling.of(params, target.vocab_size, device)
    rule = make_rule(RuleConfig(), shape, target.vocab_size, target.dtype)
    seeds = texts.seeds.to(device)

    def known(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        index = where.clamp(max=width - 1)
        return x.gather(1, index) if x.dim() == 2 else x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))

    state = drafter.begin(tokens, at, hidden, width + shape.budget + 1)
    one = torch.ones_like(at)
    first = Accepted(torch.zeros_like(at)[:, None], known(tokens, at[:, None]), one, torch.zeros_like(at))
    state = drafter.advance(state, first, known(hidden, at[:, None] - 1))
    steps = torch.zeros_like(at)
    reached = at.new_zeros(len(texts), shape.length)
    depth = torch.arange(shape.length, device=device)
    # `at` is where each row's last token stands; the text's own last token is never guessed after.
    while bool((live := at < lengths - 1).any()):
        search = rule.search(sampling, seeds, at)
        last = known(tokens, at[:, None])[:, 0]
        tree = drafter.draft(state, last, search)
        place = at[:, None] + tree.depths
        hit = (tree.tokens == known(tokens, place)) & (place < lengths[:, None])
        accepted = walk(tree, known(tokens, place + 1), hit)
        count = torch.where(live, torch.minimum(accepted.count, lengths - 1 - at), 0)
        accepted = replace(accepted, count=count)
        along = at[:, None] + torch.arange(accepted.path.shape[1], device=device)
        state = drafter.advance(state, accepted, known(hidden, along))
        steps += live
        gained = torch.where(live, torch.minimum(accepted.drafted, count), 0)
        reached += gained[:, None] > depth
        at = at + count
    tokens_gained = (texts.lengths - texts.prompts - 1).clamp(min=0).tolist()
    return [Walked(*row) for row in zip(tokens_gained, steps.tolist(), map(tuple, reached.tolist()), strict=True)]
