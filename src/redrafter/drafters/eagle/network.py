"""EAGLE's network: one transformer layer over pairs of a feature and the token that it chose.

A feature is the target's last hidden state. For each pair the layer guesses the next feature; the target's own head
makes logits of it. To guess further, the layer reads its own guesses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters.base import DrafterNet
from redrafter.drafters.eagle.config import EagleConfig


class EagleNet(DrafterNet):
    """The layer's weights. The caller keeps the keys and values of the pairs so far."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        hidden, wide = config.context_size, config.heads * config.head_size
        self.fuse = nn.Linear(hidden + config.embedding_size, hidden)
        self.query = nn.Linear(hidden, wide, bias=False)
        self.key = nn.Linear(hidden, wide, bias=False)
        self.value = nn.Linear(hidden, wide, bias=False)
        self.out = nn.Linear(wide, hidden, bias=False)
        self.gate = nn.Linear(hidden, config.exit_size, bias=False)
        self.up = nn.Linear(hidden, config.exit_size, bias=False)
        self.down = nn.Linear(config.exit_size, hidden, bias=False)
        for layer in (self.out, self.down):
            nn.init.zeros_(layer.weight)

    def pairs(self, feature: Tensor, embedding: Tensor) -> Tensor:
        """Features (B, n, hidden) and the embeddings of the tokens they chose -> the layer's input (B, n, hidden)."""
        pair: Tensor = self.fuse(torch.cat([_unit(feature), _unit(embedding)], -1))
        return pair

    def attention(self, pair: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs (B, n, hidden) at positions (B, n) -> queries, keys, values, each (B, heads, n, size)."""
        x = _unit(pair)
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        cos, sin = self._rotations(positions, x.dtype)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def feature(self, pair: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: attention's output (B, heads, n, size) -> the guessed features (B, n, hidden)."""
        pair = pair + self.out(attended.transpose(1, 2).flatten(2))
        x = _unit(pair)
        guess: Tensor = pair + self.down(F.silu(self.gate(x)) * self.up(x))
        return guess

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.config.heads, self.config.head_size).transpose(1, 2)

    def _rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, (B, 1, n, size / 2) each."""
        exact = torch.promote_types(dtype, torch.float32)
        half = torch.arange(0, self.config.head_size, 2, device=positions.device, dtype=exact)
        angle = positions[:, None, :, None] * self.config.rotary_base ** (-half / self.config.head_size)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def attend(query: Tensor, *parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention of queries (B, heads, n, size) over several parts: keys, values and visibility (B, n, m) each.

    The result is that of one attention over all parts. The keys in a cache need not be copied next to those of a few
    guesses.

    >>> q, k, v = (torch.randn(1, 1, 3, 2) for _ in range(3))
    >>> seen = torch.ones(1, 3, 3, dtype=torch.bool)
    >>> halves = [(k[:, :, a:b], v[:, :, a:b], seen[..., a:b]) for a, b in ((0, 1), (1, 3))]
    >>> torch.allclose(attend(q, *halves), F.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = [
        (query @ keys.transpose(2, 3)).to(exact).masked_fill(~visible[:, None], -torch.inf)
        for keys, _, visible in parts
    ]
    weights = (torch.cat(scores, -1) * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
    shares = weights.split([keys.shape[2] for keys, _, _ in parts], -1)
    attended = [share @ values for share, (_, values, _) in zip(shares, parts, strict=True)]
    return torch.stack(attended).sum(0) if len(attended) > 1 else attended[0]


def _unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
