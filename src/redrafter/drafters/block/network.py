"""The network of a block drafter.

Its layers read the last token and masks behind it, all at once, and attend to keys and values that are made of the
target's hidden states. A Markov head corrects each guess by the guess before it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.drafters.base import DrafterNet
from redrafter.drafters.block.config import BlockConfig
from redrafter.drafters.decoder import DecoderLayer, Norm, Rotary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) of the block -> what attention gives (B, heads, n, size)."""


class BlockNet(DrafterNet):
    """The weights. The caller keeps the keys and values of the text."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        width = config.width
        self.project = nn.Linear(config.context_size, width, bias=False)
        self.context_norm = Norm(width, config)
        self.embedding = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        if self.embedding is not None:
            self.embedding.requires_grad_(False)
        self.mask = nn.Parameter(torch.zeros(width)) if config.own_mask else None
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(DecoderLayer(config, width) for _ in range(config.blocks))
        self.norm = Norm(width, config)
        self.head = nn.Linear(width, config.guessable, bias=False) if config.head == "own" else None
        self.markov = None if config.markov == "none" else MarkovHead(config)

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        return output_embedding if self.head is None else self.head.weight

    def training_vocabulary(self, output_embedding: Tensor) -> Tensor:
        vocabulary = self.vocabulary(output_embedding)
        return vocabulary if self.markov is None else torch.cat([vocabulary, self.markov.out.weight], 1)

    @property
    def extensible(self) -> bool:
        return self.tied and self.markov is None

    def block(self, last: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Last tokens (...) -> embeddings (..., slots, width) of them and of the masks behind them."""
        masks = last.new_full((*last.shape, self.config.slots - 1), self.config.mask_token)
        embeddings = (self.embedding or embed)(torch.cat([last[..., None], masks], -1))
        if self.mask is None:
            return embeddings
        own = self.mask.to(embeddings.dtype).expand_as(embeddings[..., 1:, :])
        return torch.cat([embeddings[..., :1, :], own], -2)

    def visible(self, layer: int, last: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """What a layer sees behind last tokens at places (...): of the text (..., room), and slots of slots."""
        config, place = self.config, torch.arange(room, device=last.device)
        text, window = place < last[..., None], config.windows[layer] if config.windows else 0
        if window:
            text = text & (place >= last[..., None] - window)
        slots = torch.ones(config.slots, config.slots, dtype=torch.bool, device=last.device)
        return text, slots.tril() if config.causal or (window > 0 and config.causal_windows) else slots

    def memory(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's hidden states (B, n, C) at positions (B, n) -> keys and values (B, layers, heads, n, size)."""
        context = self.context_norm(self.project(hidden))
        turn = self.rotary(positions, context.dtype)
        layers: Iterable[Any] = self.blocks
        keys, values = zip(*(layer.memory(context, turn) for layer in layers), strict=True)
        return torch.stack(keys, 1), torch.stack(values, 1)

    def run(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Embeddings of the block (B, n, width) at positions (B, n) -> features (B, n, width)."""
        stream, turn = embeddings, self.rotary(positions, embeddings.dtype)
        layers: Iterable[Any] = self.blocks
        for i, layer in enumerate(layers):
            stream = layer.finish(stream, attend(i, *layer.attention(layer.norm(stream), turn)))
        features: Tensor = self.norm(stream)
        return features


class MarkovHead(nn.Module):
    """Logits to add, from the guess before: of low rank, perhaps gated by the features, or with a recurrent state."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, self.form = config.markov_rank, config.markov
        self.known = nn.Embedding(config.vocab_size, rank)
        self.out = nn.Linear(rank, config.guessable, bias=False)
        nn.init.zeros_(self.out.weight)
        self.gate = nn.Linear(config.width + rank, rank) if self.form == "gated" else None
        self.joint = nn.Linear(2 * rank + config.width, 3 * rank) if self.form == "rnn" else None

    def forward(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, w), features (B, w, width), state (B, w, rank), zero at first -> logits (B, w, V'), new state."""
        known, state = self.read(tokens, features, state)
        return self.out(known), state

    def read(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same, before `out` makes logits of what is known (..., rank)."""
        known: Tensor = self.known(tokens)
        if self.gate is not None:
            known = torch.sigmoid(self.gate(torch.cat([features, known], -1))) * known
        if self.joint is not None:
            gate, new, known = self.joint(torch.cat([state, known, features], -1)).chunk(3, -1)
            share = torch.sigmoid(gate)
            state, known = share * state + (1 - share) * torch.tanh(new), torch.tanh(known)
        return known, state
