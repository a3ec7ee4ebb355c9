"""Prompt lookup: guess that the last few tokens continue as they did earlier in the same text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class Matches:
    """Earlier places in the text that end like the text itself, the longest, then most recent, first."""

    starts: Tensor  # (B, W) where the continuation of each match starts
    sizes: Tensor  # (B, W) matched tokens; 0: no such match


def find_matches(state: NgramState, longest: int, shortest: int, count: int) -> Matches:
    slots = state.tokens.shape[1]
    place = torch.arange(slots, device=state.tokens.device)
    back = torch.arange(longest, 0, -1, device=place.device)
    at_end = state.tokens.gather(1, (state.lengths[:, None] - back).clamp(min=0))  # (B, longest)
    before = F.pad(state.tokens, (longest, -1), value=-1).unfold(
        1, longest, 1
    )  # (B, S, longest) the tokens before each
    same = (before == at_end[:, None]).flip(2)
    run = same.long().cumprod(2).sum(2)  # run[b, e]: tokens before e that equal the text's end
    usable = (run >= shortest) & (place < state.lengths[:, None])
    rank = torch.where(usable, run * slots + place, -1)  # longer matches first, then later ones
    # a reduction, since a GPU's top-k takes 25 microseconds
    best, starts = rank.max(1, keepdim=True) if count == 1 else rank.topk(min(count, slots), dim=1)
    return Matches(starts, torch.where(best >= 0, best // slots, 0))


def continuations(state: NgramState, starts: Tensor, length: int) -> Tensor:
    """(B, W, L) what followed; if the text ends before the guess does, repeat: the text is in a loop."""
    period = (state.lengths[:, None] - starts).clamp(min=1)[..., None]
    where = starts[..., None] + torch.arange(length, device=starts.device) % period
    return state.tokens.gather(1, where.flatten(1)).view_as(where)


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
        found = find_matches(state, self.longest, self.shortest, search.shape.width)
        beam = continuations(state, found.starts, search.shape.length)
        real = (found.sizes > 0)[..., None].expand(beam.shape)
        # Every token of the first candidate ranks before any token of the second.
        order = -torch.arange(beam.shape[1], device=last.device, dtype=torch.float32)[:, None].expand(beam.shape)
        return search.candidates(beam, order.masked_fill(~real, -torch.inf), last)

    def keep(self, state: NgramState, rows: Tensor) -> NgramState:
        return keep_rows(state, rows)
