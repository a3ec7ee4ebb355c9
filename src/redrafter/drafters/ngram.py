"""Prompt lookup: guess that the last few tokens continue as they did earlier in the same text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.bounds import Count, checked
from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.errors import ConfigError
from redrafter.kernels.ngram_match import continuations, matches
from redrafter.targets import TargetInfo


@dataclass(frozen=True)
class NgramState:
    """The text of each row."""

    tokens: Tensor  # (B, S) the last token included
    lengths: Tensor  # (B,)


class NgramDrafter:
    """Needs no training and no weights. Guesses nothing where the text does not repeat."""

    name = "ngram"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=1, length=7)
    network_drafter = None
    copies = True

    @checked
    def __init__(self, longest: Count = 4, shortest: Count = 2) -> None:
        if shortest > longest:
            raise ConfigError(f"n-gram sizes must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    @property
    def identity(self) -> str:
        return f"ngram {self.shortest}-{self.longest}"

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> NgramState:
        room = tokens.new_zeros(tokens.shape[0], slots)
        room[:, : tokens.shape[1]] = tokens
        return NgramState(room, lengths)

    def recall(self, state: NgramState, past: Tensor, sizes: Tensor) -> NgramState:
        """The same rows with other texts (B, M) before their own, of `sizes` (B,) tokens: both are searched.

        >>> state = NgramDrafter().recall(NgramState(torch.tensor([[1, 2, 0]]), torch.tensor([2])),
        ...                               torch.tensor([[1, 2, 9, 0]]), torch.tensor([3]))
        >>> state.tokens.tolist(), state.lengths.tolist()
        ([[1, 2, 9, 1, 2, 0, 0]], [5])
        """
        own = sizes[:, None] + torch.arange(state.tokens.shape[1], device=sizes.device)
        room = torch.cat([past, torch.zeros_like(state.tokens)], dim=1)
        return NgramState(room.scatter(1, own, state.tokens), sizes + state.lengths)

    def advance(self, state: NgramState, accepted: Accepted, hidden: Tensor) -> NgramState:
        place = torch.arange(accepted.tokens.shape[1], device=state.lengths.device)
        slots = state.lengths[:, None] + place
        new = torch.where(place < accepted.count[:, None], accepted.tokens, state.tokens.gather(1, slots))
        return NgramState(state.tokens.scatter(1, slots, new), state.lengths + accepted.count)

    def draft(self, state: NgramState, last: Tensor, search: Search) -> Tree:
        """The continuations of the longest, then most recent, earlier matches of the text's end."""
        text = state.tokens, state.lengths
        starts, sizes = matches(*text, self.longest, self.shortest, search.shape.width)
        beam = continuations(*text, starts, search.shape.length)
        real = (sizes > 0)[..., None].expand(beam.shape)
        # Every token of the first candidate ranks before any token of the second.
        order = -torch.arange(beam.shape[1], device=last.device, dtype=torch.float32)[:, None].expand(beam.shape)
        return search.candidates(beam, order.masked_fill(~real, -torch.inf), last)

    def keep(self, state: NgramState, rows: Tensor) -> NgramState:
        return keep_rows(state, rows)


def make(target: TargetInfo) -> NgramDrafter:  # noqa: ARG001 - as all drafters are made
    return NgramDrafter()
