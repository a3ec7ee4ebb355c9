"""EAGLE's network: decoder layers over pairs of a feature and the token that it chose.

The first feature of a pair comes from the target's hidden states. For each pair the layers guess the next feature, and
a head makes logits of it. To guess further, the network reads its own guesses.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.drafters.base import DrafterNet
from redrafter.drafters.decoder import DecoderLayer, Norm, Rotary
from redrafter.drafters.eagle.config import EagleConfig
from redrafter.drafters.eagle.target_layer import TargetLayer

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""(layer, queries, keys, values) -> what attention gives (B, heads, n, size); None ends the pass."""


class EagleNet(DrafterNet):
    """The layers' weights. The caller keeps the keys and values of the pairs so far.

    `layers` stand in place of our own where they are of the kind that the target has.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, layers: Iterable[TargetLayer] = ()) -> None:
        super().__init__(config)
        width, pair = config.features, config.features + config.embedded
        states = {"none": 0, "whole": 1, "each": len(config.layers)}[config.context_norm]
        self.context_norms = nn.ModuleList(Norm(config.context_size // states, config) for _ in range(states))
        self.project = nn.Linear(config.context_size, width, bias=False) if config.projected else None
        self.embedding = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        if self.embedding is not None:
            self.embedding.requires_grad_(False)
        self.feature_norm, self.embedding_norm = Norm(width, config), Norm(config.embedded, config)
        self.fuse = None if config.joined else nn.Linear(pair, width)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(layers) or nn.ModuleList(
            DecoderLayer(config, width, pair if config.joined and i == 0 else None) for i in range(config.blocks)
        )
        self.norm = Norm(width, config) if config.last_norm else None
        self.head = nn.Linear(width, config.guessable, bias=False) if config.head == "own" else None

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        return output_embedding if self.head is None else self.head.weight

    def first_features(self, context: Tensor) -> Tensor:
        """The target's hidden states (..., C) -> features (..., width)."""
        if self.context_norms:
            each = context.chunk(len(self.context_norms), -1)
            context = torch.cat([norm(x) for norm, x in zip(self.context_norms, each, strict=True)], -1)
        return context if self.project is None else self.project(context)

    def run(self, feature: Tensor, embedding: Tensor, positions: Tensor, attend: Attend) -> Tensor | None:
        """Pairs (B, n, ·) at positions (B, n) -> the last layer's output (B, n, width); None if `attend` ended it."""
        if not self.config.first_embedding:
            embedding = embedding.masked_fill((positions == 0)[..., None], 0)
        normed = self.feature_norm(feature)
        pair = torch.cat([self.embedding_norm(embedding), normed], -1)
        stream = normed if self.config.residual == "normed" else feature
        if self.fuse is not None:
            stream = self.fuse(pair)
        turn = self.rotary(positions, pair.dtype)
        layers: Iterable[Any] = self.blocks
        for i, layer in enumerate(layers):
            if isinstance(layer, TargetLayer):
                after = layer(stream, positions, partial(attend, i))
            else:
                x = pair if i == 0 and self.config.joined else layer.norm(stream)
                attended = attend(i, *layer.attention(x, turn))
                after = None if attended is None else layer.finish(stream, attended)
            if after is None:
                return None
            stream = after
        return stream

    def next_features(self, output: Tensor) -> Tensor:
        """The last layer's output -> the features of the next pairs."""
        return self.for_head(output) if self.config.recycled == "normed" else output

    def for_head(self, output: Tensor) -> Tensor:
        """The last layer's output -> what the vocabulary turns into logits."""
        return output if self.norm is None else self.norm(output)
