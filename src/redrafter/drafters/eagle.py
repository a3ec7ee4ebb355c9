"""EAGLE: a transformer layer of its own over the target's features, with its own keys and values, in a beam search."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import int8
from redrafter.drafters.base import output_rows, settled
from redrafter.drafters.int8 import Product
from redrafter.nets.eagle import EagleNet, attend
from redrafter.targets import Target


@dataclass(frozen=True)
class Followed:
    """Keys and values of every decided pair, and the feature guessed to come next. Written in place."""

    keys: Tensor  # (B, heads, S, size)
    values: Tensor  # (B, heads, S, size)
    lengths: Tensor  # (B,) pairs in them
    feature: Tensor  # (B, H)


@dataclass(frozen=True)
class _Beams:
    """What w beams guessed to come next, and the m guesses so far with those that each beam descends from."""

    feature: Tensor  # (B, w, H)
    keys: Tensor  # (B, heads, m, size)
    values: Tensor  # (B, heads, m, size)
    paths: Tensor  # (B, w, m) bool
    depth: int  # of the next guess, from 0


class EagleDrafter:
    """An `EagleNet` bound to a target, whose embeddings it reads and whose head it uses."""

    name = "eagle"

    def __init__(self, net: EagleNet, target: Target) -> None:
        self.net = settled(net, target)
        self.embed = target.input_embedding
        self.vocabulary = output_rows(net, target)
        self.logits: Product = lambda x: F.linear(x, self.vocabulary)

    @property
    def default_shape(self) -> Shape:
        on_gpu = self.vocabulary.device.type == "cuda"
        return Shape(width=16, length=6, nodes=63) if on_gpu else Shape(width=3, length=3, nodes=5)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.config.layers

    def lean(self) -> "EagleDrafter":
        """On a CPU in fp32: products of int8 weights. For networks that we read ourselves."""
        if int8.fits(self.vocabulary):
            int8.lean_linears(self.net)
            self.logits = int8.rounded(self.vocabulary)
        return self

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Followed:
        batch, width = tokens.shape
        config = self.net.config
        room = [hidden.new_zeros(batch, config.heads, slots, config.head_size) for _ in range(2)]
        if width > 1:  # the last hidden state's pair comes with the token it chooses, through `advance`
            pair = self.net.pairs(hidden[:, :-1], self.embed(tokens[:, 1:]))
            places = torch.arange(width - 1, device=tokens.device).expand(batch, -1)
            _, room[0][:, :, : width - 1], room[1][:, :, : width - 1] = self.net.attention(pair, places)
        return Followed(room[0], room[1], lengths - 1, hidden[:, 0])

    def advance(self, state: Followed, accepted: Accepted, hidden: Tensor) -> Followed:
        """Pairs past `count` are read too; their places are written again next time, and nobody looks there before."""
        pair = self.net.pairs(hidden, self.embed(accepted.tokens))
        place = torch.arange(hidden.shape[1], device=hidden.device)
        slots = state.lengths[:, None] + place  # (B, n)
        query, key, value = self.net.attention(pair, slots)
        index = slots[:, None, :, None].expand_as(key)
        state.keys.scatter_(2, index, key)
        state.values.scatter_(2, index, value)
        visible = torch.arange(state.keys.shape[2], device=hidden.device) <= slots[..., None]  # (B, n, S)
        feature = self.net.feature(pair, attend(query, (state.keys, state.values, visible)))
        end = (accepted.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, feature.shape[2])
        latest = torch.where(accepted.count[:, None] > 0, feature.gather(1, end)[:, 0], state.feature)
        return Followed(state.keys, state.values, state.lengths + accepted.count, latest)

    def draft(self, state: Followed, last: Tensor, search: Search) -> Tree:
        committed = torch.arange(state.keys.shape[2], device=last.device) < state.lengths[:, None]  # (B, S)

        def advance(beams: _Beams | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, _Beams]:
            batch, width = tokens.shape
            if beams is None:  # the last token's pair has been read
                none = state.keys[:, :, :0]
                beams = _Beams(state.feature[:, None], none, none, committed[:, None, :0], depth=0)
                return self.logits(beams.feature), beams
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            paths = torch.cat([_rows(beams.paths, parents), own], 2)
            pair = self.net.pairs(_rows(beams.feature, parents), self.embed(tokens))
            positions = (state.lengths + beams.depth)[:, None].expand(-1, width)
            query, key, value = self.net.attention(pair, positions)
            keys, values = torch.cat([beams.keys, key], 2), torch.cat([beams.values, value], 2)
            text = (state.keys, state.values, committed[:, None].expand(-1, width, -1))
            feature = self.net.feature(pair, attend(query, text, (keys, values, paths)))
            return self.logits(feature), _Beams(feature, keys, values, paths, beams.depth + 1)

        return search.tree(advance, None, last, self.net.token_ids)

    def keep(self, state: Followed, rows: Tensor) -> Followed:
        return keep_rows(state, rows)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B, w) -> (B, w, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
