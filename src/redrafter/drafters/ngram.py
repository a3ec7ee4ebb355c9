"""Prompt lookup: guess that the last few tokens continue as they did earlier in the same text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.errors import ConfigError


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

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"n-gram sizes must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> NgramState:
        room = tokens.new_zeros(tokens.shape[0], slots)
        room[:, : tokens.shape[1]] = tokens
        return NgramState(room, lengths)

    def advance(self, state: NgramState, accepted: Accepted, hidden: Tensor) -> NgramState:
        place = torch.arange(accepted.tokens.shape[1], device=state.lengths.device)
        slots = state.lengths[:, None] + place
        new = torch.where(place < accepted.count[:, None], accepted.tokens, state.tokens.gather(1, slots))
        return NgramState(state.tokens.scatter(1, slots, new), state.lengths + accepted.count)

    def draft(self, state: NgramState, last: Tensor, search: Search) -> Tree:
        """The continuations of the longest, then most recent, earlier matches of the text's end."""
        width, length = search.shape.width, search.shape.length
        batch, slots = state.tokens.shape
        place = torch.arange(slots, device=last.device)
        matched = torch.ones(batch, slots, dtype=torch.bool, device=last.device)
        run = torch.zeros(batch, slots, dtype=torch.long, device=last.device)
        for back in range(1, self.longest + 1):  # run[b, e]: tokens before e that equal the text's end
            at_end = state.tokens.gather(1, (state.lengths - back).clamp(min=0)[:, None])
            matched = matched & (state.tokens.roll(back, 1) == at_end) & (place >= back)
            run = run + matched
        usable = (run >= self.shortest) & (place < state.lengths[:, None])
        rank = torch.where(usable, run * slots + place, -1)
        best, start = rank.topk(min(width, slots), dim=1)  # (B, W) where each continuation starts
        # Copy what followed the match. If the text ends before the guess does, repeat: the text is in a loop.
        period = (state.lengths[:, None] - start).clamp(min=1)[..., None]
        where = start[..., None] + torch.arange(length, device=last.device) % period  # (B, W, L)
        beam = state.tokens.gather(1, where.flatten(1)).view_as(where)
        real = (best >= 0)[..., None].expand(where.shape)
        # Every token of the first candidate ranks before any token of the second.
        order = -torch.arange(where.shape[1], device=last.device, dtype=torch.float32)[:, None].expand(where.shape)
        return search.candidates(beam, order.masked_fill(~real, -torch.inf), last)

    def keep(self, state: NgramState, rows: Tensor) -> NgramState:
        return keep_rows(state, rows)
