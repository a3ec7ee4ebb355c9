"""EAGLE at work: beam search with the layers' own keys and values, which it keeps for the whole text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.decoder import attend, attend_causally
from redrafter.drafters.eagle.network import EagleNet
from redrafter.drafters.eagle.target_layer import TargetLayer
from redrafter.targets import TargetInfo


@dataclass(frozen=True)
class EagleState:
    """What the drafter keeps of the text. `advance` writes keys and values in place."""

    keys: Tensor  # (B, layers, heads, S, size) of every decided pair
    values: Tensor  # (B, layers, heads, S, value size)
    lengths: Tensor  # (B,) how many pairs they hold
    output: Tensor  # (B, width) of the last layer, for the last pair


@dataclass(frozen=True)
class EagleBeams:
    """The w beams of a search, and the m guesses visited so far."""

    output: Tensor  # (B, w, width) of the last layer, for each beam's last pair
    keys: Tensor  # (B, layers, heads, m, size) of the guesses
    values: Tensor  # (B, layers, heads, m, size)
    paths: Tensor  # (B, w, m) bool: the guesses that each beam descends from
    depth: int  # of the next guess, from 0


class EagleDrafter(NetDrafter[EagleNet]):
    """An `EagleNet` bound to a target."""

    def __init__(self, net: EagleNet, target: TargetInfo) -> None:
        super().__init__(net, target)
        if self.net.embedding is not None:
            self.embed = self.net.embedding

    @property
    def name(self) -> str:
        return "mtp" if self.keeps_cache else super().name

    @property
    def keeps_cache(self) -> bool:
        """Layers of transformers may wait for the host (experts do), which no recording can."""
        return any(isinstance(layer, TargetLayer) for layer in self.net.blocks)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> EagleState:
        batch, width = tokens.shape
        config = self.net.config
        shape = (batch, config.blocks, config.key_heads, slots)
        keys = hidden.new_zeros(*shape, config.head_size)
        values = hidden.new_zeros(*shape, config.value_size or config.head_size)

        def read(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
            keys[:, layer, :, : width - 1], values[:, layer, :, : width - 1] = key, value
            return None if layer + 1 == config.blocks else attend_causally(query, key, value)

        if width > 1:  # the pair of the last hidden state needs the token it chose: `advance` adds it
            places = torch.arange(width - 1, device=tokens.device).expand(batch, -1)
            self.net.run(self.net.first_features(hidden[:, :-1]), self.embed(tokens[:, 1:]), places, read)
        return EagleState(keys, values, lengths - 1, hidden.new_zeros(batch, config.features))

    def advance(self, state: EagleState, accepted: Accepted, hidden: Tensor) -> EagleState:
        """Pairs past `count` are written too; the next call overwrites them before anything reads them."""
        place = torch.arange(hidden.shape[1], device=hidden.device)
        slots = state.lengths[:, None] + place  # (B, n)
        rows = torch.arange(len(slots), device=hidden.device)[:, None]
        visible = torch.arange(state.keys.shape[3], device=hidden.device) <= slots[..., None]  # (B, n, S)

        def write(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept = state.keys[:, layer], state.values[:, layer]
            for room, new in zip(kept, (key, value), strict=True):  # not `scatter_`: a compiler would copy the room
                room.transpose(1, 2)[rows, slots] = new.transpose(1, 2)
            return attend(query, (*kept, visible))

        output = self.net.run(self.net.first_features(hidden), self.embed(accepted.tokens), slots, write)
        assert output is not None
        end = (accepted.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[2])
        latest = torch.where(accepted.count[:, None] > 0, output.gather(1, end)[:, 0], state.output)
        return EagleState(state.keys, state.values, state.lengths + accepted.count, latest)

    def draft(self, state: EagleState, last: Tensor, search: Search) -> Tree:
        committed = torch.arange(state.keys.shape[3], device=last.device) < state.lengths[:, None]  # (B, S)

        def advance(beams: EagleBeams | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, EagleBeams]:
            batch, width = tokens.shape
            if beams is None:  # `advance` has already read the pair of the last token
                none = state.keys[:, :, :, :0], state.values[:, :, :, :0]
                beams = EagleBeams(state.output[:, None], *none, committed[:, None, :0], depth=0)
                return self.logits(self.net.for_head(beams.output)), beams
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            paths = torch.cat([_rows(beams.paths, parents), own], 2)
            positions = (state.lengths + beams.depth)[:, None].expand(-1, width)
            seen = committed[:, None].expand(-1, width, -1)
            keys, values = [], []

            def guess(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys.append(torch.cat([beams.keys[:, layer], key], 2))
                values.append(torch.cat([beams.values[:, layer], value], 2))
                text = (state.keys[:, layer], state.values[:, layer], seen)
                return attend(query, text, (keys[layer], values[layer], paths))

            feature = self.net.next_features(_rows(beams.output, parents))
            output = self.net.run(feature, self.embed(tokens), positions, guess)
            assert output is not None
            logits = self.logits(self.net.for_head(output))
            return logits, EagleBeams(output, torch.stack(keys, 1), torch.stack(values, 1), paths, beams.depth + 1)

        return search.tree(advance, None, last, self.net.token_ids)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B, w) -> (B, w, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
