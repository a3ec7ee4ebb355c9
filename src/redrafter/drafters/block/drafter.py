"""A block drafter at work: one pass guesses a distribution for each place, and a beam search finds the best paths.

A path's probability is the product over its places, or with a Markov head that of its conditional probabilities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.block.network import BlockNet
from redrafter.drafters.decoder import attend
from redrafter.targets import TargetInfo


@dataclass(frozen=True)
class BlockState:
    """What the drafter keeps of the text. `advance` writes keys and values in place."""

    keys: Tensor  # (B, layers, heads, S, size) of the tokens before the last one
    values: Tensor  # (B, layers, heads, S, size)
    lengths: Tensor  # (B,) how many tokens these are


class BlockDrafter(NetDrafter[BlockNet]):
    """A `BlockNet` bound to a target."""

    def __init__(self, net: BlockNet, target: TargetInfo) -> None:
        super().__init__(net, target)
        self.slots = torch.arange(self.net.config.slots, device=self.vocabulary.device)

    @property
    def default_length(self) -> int:
        return self.net.config.guesses

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> BlockState:
        batch, width = tokens.shape
        config = self.net.config
        shape = (batch, config.blocks, config.key_heads, slots, config.head_size)
        keys, values = hidden.new_zeros(shape), hidden.new_zeros(shape)
        places = torch.arange(width, device=tokens.device).expand(batch, -1)
        keys[:, :, :, :width], values[:, :, :, :width] = self.net.memory(hidden, places)
        return BlockState(keys, values, lengths - 1)  # `advance` brings the last hidden state again, with its token

    def advance(self, state: BlockState, accepted: Accepted, hidden: Tensor) -> BlockState:
        """Keys past `count` are written too; the next call overwrites them before anything reads them."""
        slots = state.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)  # (B, n)
        rows = torch.arange(len(slots), device=hidden.device)[:, None]
        for room, new in zip((state.keys, state.values), self.net.memory(hidden, slots), strict=True):
            room.permute(0, 3, 1, 2, 4)[rows, slots] = new.permute(0, 3, 1, 2, 4)
        return BlockState(state.keys, state.values, state.lengths + accepted.count)

    def draft(self, state: BlockState, last: Tensor, search: Search) -> Tree:
        config, first = self.net.config, 0 if self.net.config.from_last else 1
        features = self._features(state, last)[:, first : first + config.guesses]
        logits = self.logits(features)  # (B, guesses, V')
        markov = self.net.markov
        memory = features.new_zeros(len(last), 1, config.markov_rank)

        def advance(
            at: tuple[int, Tensor], tokens: Tensor, parents: Tensor
        ) -> tuple[Tensor | None, tuple[int, Tensor]]:
            depth, before = at
            if depth == config.guesses:
                return None, at
            width = tokens.shape[1]
            here = logits[:, depth, None].expand(-1, width, -1)
            if markov is None:
                return here, (depth + 1, before)
            before = before.gather(1, parents[..., None].expand(-1, -1, before.shape[2]))
            more, before = markov(tokens, features[:, depth, None].expand(-1, width, -1), before)
            return here + more, (depth + 1, before)

        return search.tree(advance, (0, memory), last, self.net.token_ids)

    def _features(self, state: BlockState, last: Tensor) -> Tensor:
        """(B, slots, width) of the last token and the masks behind it."""
        room = state.keys.shape[3]

        def read(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            text, block = self.net.visible(layer, state.lengths, room)
            seen, own = (x.expand(len(last), len(self.slots), -1) for x in (text[:, None], block))
            return attend(query, (state.keys[:, layer], state.values[:, layer], seen), (key, value, own))

        return self.net.run(self.net.block(last, self.embed), state.lengths[:, None] + self.slots, read)
