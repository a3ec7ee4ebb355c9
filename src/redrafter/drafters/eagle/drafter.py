"""EAGLE at work: beam search with the layer's own keys and values, which it keeps for the whole text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.eagle.network import EagleNet, attend


@dataclass(frozen=True)
class EagleState:
    """What the drafter keeps of the text. `advance` writes keys and values in place."""

    keys: Tensor  # (B, heads, S, size) of every decided pair
    values: Tensor  # (B, heads, S, size)
    lengths: Tensor  # (B,) how many pairs they hold
    feature: Tensor  # (B, H) the guess of the next feature


@dataclass(frozen=True)
class EagleBeams:
    """The w beams of a search, and the m guesses visited so far."""

    feature: Tensor  # (B, w, H) the guess of each beam's next feature
    keys: Tensor  # (B, heads, m, size) of the guesses
    values: Tensor  # (B, heads, m, size)
    paths: Tensor  # (B, w, m) bool: the guesses that each beam descends from
    depth: int  # of the next guess, from 0


class EagleDrafter(NetDrafter[EagleNet]):
    """An `EagleNet` bound to a target."""

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> EagleState:
        batch, width = tokens.shape
        config = self.net.config
        room = [hidden.new_zeros(batch, config.heads, slots, config.head_size) for _ in range(2)]
        if width > 1:  # the pair of the last hidden state needs the token it chose: `advance` adds it
            pair = self.net.pairs(hidden[:, :-1], self.embed(tokens[:, 1:]))
            places = torch.arange(width - 1, device=tokens.device).expand(batch, -1)
            _, room[0][:, :, : width - 1], room[1][:, :, : width - 1] = self.net.attention(pair, places)
        return EagleState(room[0], room[1], lengths - 1, hidden[:, 0])

    def advance(self, state: EagleState, accepted: Accepted, hidden: Tensor) -> EagleState:
        """Pairs past `count` are written too; the next call overwrites them before anything reads them."""
        pair = self.net.pairs(hidden, self.embed(accepted.tokens))
        place = torch.arange(hidden.shape[1], device=hidden.device)
        slots = state.lengths[:, None] + place  # (B, n)
        query, key, value = self.net.attention(pair, slots)
        rows = torch.arange(len(slots), device=hidden.device)[:, None]
        for room, new in ((state.keys, key), (state.values, value)):  # not `scatter_`: a compiler would copy the room
            room.transpose(1, 2)[rows, slots] = new.transpose(1, 2)
        visible = torch.arange(state.keys.shape[2], device=hidden.device) <= slots[..., None]  # (B, n, S)
        feature = self.net.feature(pair, attend(query, (state.keys, state.values, visible)))
        end = (accepted.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, feature.shape[2])
        latest = torch.where(accepted.count[:, None] > 0, feature.gather(1, end)[:, 0], state.feature)
        return EagleState(state.keys, state.values, state.lengths + accepted.count, latest)

    def draft(self, state: EagleState, last: Tensor, search: Search) -> Tree:
        committed = torch.arange(state.keys.shape[2], device=last.device) < state.lengths[:, None]  # (B, S)

        def advance(beams: EagleBeams | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, EagleBeams]:
            batch, width = tokens.shape
            if beams is None:  # `advance` has already read the pair of the last token
                none = state.keys[:, :, :0]
                beams = EagleBeams(state.feature[:, None], none, none, committed[:, None, :0], depth=0)
                return self.logits(beams.feature), beams
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            paths = torch.cat([_rows(beams.paths, parents), own], 2)
            pair = self.net.pairs(_rows(beams.feature, parents), self.embed(tokens))
            positions = (state.lengths + beams.depth)[:, None].expand(-1, width)
            query, key, value = self.net.attention(pair, positions)
            keys, values = torch.cat([beams.keys, key], 2), torch.cat([beams.values, value], 2)
            text = (state.keys, state.values, committed[:, None].expand(-1, width, -1))
            feature = self.net.feature(pair, attend(query, text, (keys, values, paths)))
            return self.logits(feature), EagleBeams(feature, keys, values, paths, beams.depth + 1)

        return search.tree(advance, None, last, self.net.token_ids)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B, w) -> (B, w, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
