"""Simulates tokens/step on texts that the target has already written, without decoding them again.

The result is exact, because a lossless rule accepts exactly the tokens of the text. It is cheap, because one forward
pass over a text gives all hidden states that the drafter needs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted, walk
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.targets import Target
from redrafter.texts import Texts

GPU_ROWS, CPU_ROWS = 128, 16
"""Texts in one batch. A CPU gains nothing from more rows and pays for their padding."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done and the total."""


@dataclass(frozen=True)
class SimulatedSteps:
    """Counts for one text, or their sums over several texts."""

    tokens: int
    steps: int
    reached: tuple[int, ...]
    """reached[d]: steps that accepted more than d tokens, for d within the beam."""

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: "SimulatedSteps") -> "SimulatedSteps":
        reached = tuple(a + b for a, b in zip(self.reached, other.reached, strict=True))
        return SimulatedSteps(self.tokens + other.tokens, self.steps + other.steps, reached)

    @staticmethod
    def total(parts: Iterable["SimulatedSteps"], shape: Shape) -> "SimulatedSteps":
        return sum(parts, start=SimulatedSteps(0, 0, (0,) * shape.length))


def simulate(target: Target, drafter: Drafter, texts: Texts, shape: Shape) -> SimulatedSteps:
    """The sums over all texts."""
    return simulate_batches(text_batches(target, drafter.layers, texts), drafter, shape)


def simulate_batches(
    batches: Iterable["TextBatch"], drafter: Drafter, shape: Shape, pause: Callable[[], None] = lambda: None
) -> SimulatedSteps:
    """The sums over all texts of these batches."""
    return SimulatedSteps.total((text for batch in batches for text in batch.simulate(drafter, shape, pause)), shape)


@torch.no_grad()
def text_batches(target: Target, layers: tuple[int, ...], texts: Texts) -> Iterator["TextBatch"]:
    """Batches of texts of similar length, with the target's hidden states at these layers."""
    rows = GPU_ROWS if target.device.type == "cuda" else CPU_ROWS
    for part in torch.split(texts.lengths.argsort(stable=True), rows):
        yield TextBatch(target, layers, texts, part.tolist())


class TextBatch:
    """Padded texts with hidden states, reusable for any number of shapes. `rows` are indices into all texts."""

    def __init__(self, target: Target, layers: tuple[int, ...], texts: Texts, rows: list[int]) -> None:
        self.target, self.rows, self.texts = target, rows, texts.select(rows)
        device = target.device
        self.longest = int(self.texts.lengths.max())
        tokens = torch.zeros(len(rows), self.longest, dtype=torch.long)
        for index in range(len(rows)):
            text = self.texts.row(index)
            tokens[index, : len(text)] = text
        self.tokens = tokens.to(device)
        self.hidden = target.states(self.tokens, layers) if layers else torch.zeros(*tokens.shape, 0, device=device)
        params = [SamplingParams(temperature=t) for t in self.texts.temperatures.tolist()]
        self.sampling = Sampling.of(params, target.vocab_size, device)

    def _gather(self, x: Tensor, positions: Tensor) -> Tensor:
        """Values of (B, S) or (B, S, C) at positions (B, n)."""
        index = positions.clamp(max=self.longest - 1)
        return x.gather(1, index) if x.dim() == 2 else x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))

    def token_at(self, positions: Tensor) -> Tensor:
        """The tokens of the texts at positions (B, n)."""
        return self._gather(self.tokens, positions)

    @torch.no_grad()
    def simulate(
        self, drafter: Drafter, shape: Shape, pause: Callable[[], None] = lambda: None
    ) -> list[SimulatedSteps]:
        """Counts for each text, as `Engine` counts: the first new token comes from the prompt's forward pass."""
        device, target, texts = self.target.device, self.target, self.texts
        lengths, last, seeds = (x.to(device) for x in (texts.lengths, texts.prompts, texts.seeds))
        rule = make_rule(RuleConfig(), shape, target.vocab_size, target.dtype)
        state = drafter.begin(self.tokens, last, self.hidden, self.longest + shape.budget + 1)
        zero = torch.zeros_like(last)
        first = Accepted(zero[:, None], self.token_at(last[:, None]), zero + 1, zero, zero)
        state = drafter.advance(state, first, self._gather(self.hidden, last[:, None] - 1))
        steps, reached = torch.zeros_like(last), last.new_zeros(len(texts), shape.length)
        depth = torch.arange(shape.length, device=device)
        # `last` is the position of each row's last decided token. Nothing is drafted after the end of a text.
        while bool((live := last < lengths - 1).any()):
            pause()
            search = rule.search(self.sampling, seeds, last)
            tree = drafter.draft(state, self.token_at(last[:, None])[:, 0], search)
            positions = last[:, None] + tree.depths
            hit = (tree.tokens == self.token_at(positions)) & (positions < lengths[:, None])
            accepted = walk(tree, self.token_at(positions + 1), hit)
            count = torch.where(live, torch.minimum(accepted.count, lengths - 1 - last), 0)
            accepted = replace(accepted, count=count)
            path = last[:, None] + torch.arange(accepted.path.shape[1], device=device)
            state = drafter.advance(state, accepted, self._gather(self.hidden, path))
            steps += live
            reached += torch.where(live, torch.minimum(accepted.drafted, count), 0)[:, None] > depth
            last = last + count
        tokens = (texts.lengths - texts.prompts - 1).clamp(min=0).tolist()
        return [SimulatedSteps(*row) for row in zip(tokens, steps.tolist(), map(tuple, reached.tolist()), strict=True)]
