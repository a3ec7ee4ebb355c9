"""A decoder layer of a drafter: attention with grouped keys and rotary positions, then a gated MLP.

The caller keeps the keys and values. EAGLE-like and block networks are made of these layers.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.bounds import Bounds, Positive, Size
from redrafter.config import require
from redrafter.drafters.base import DrafterConfig, target_sizes
from redrafter.drafters.options import DrafterOptions
from redrafter.targets import Target

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles, (B, 1, n, r / 2) each: the first r numbers of a head are turned."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DrafterConfig):
    """Sizes of a network of decoder layers."""

    blocks: Annotated[int, Bounds(least=1, most=64)] = 1
    """Decoder layers."""
    heads: Size
    """Attention heads."""
    kv_heads: Size | None = None
    """Heads of keys and values (as many as attention heads when not given)."""
    head_size: Size = 64
    """Width of each attention head."""
    exit_size: Size
    """Width of the layers' MLP."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary position embedding."""
    frequencies: tuple[Positive, ...] = ()
    """The rotary frequencies, if they do not follow from the base; those of fewer numbers turn a part of each head."""
    rotary_scale: Positive = 1.0
    """Scale of the turned queries and keys."""
    scaled_norms: bool = False
    """Whether norms have weights."""
    norm_eps: Positive | None = None
    """Added to the mean square by norms (default: the smallest number that changes 1)."""
    head_norms: bool = False
    """Whether the queries and keys of each head are normalised."""
    attention_bias: bool = False
    """Whether queries, keys and values have a bias."""
    out_bias: bool = False
    """Whether attention's output has a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_size % 2 == 0, f"head_size must be even, got {self.head_size}")
        require(
            self.heads % self.key_heads == 0, f"{self.heads} heads cannot share {self.key_heads} heads of keys evenly"
        )
        require(
            2 * len(self.frequencies) <= self.head_size,
            f"a head of {self.head_size} numbers has at most {self.head_size // 2} frequencies, "
            f"got {len(self.frequencies)}",
        )

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads


def sizes_for(options: DrafterOptions, target: Target, blocks: int) -> dict[str, Any]:
    """The fields of a new network of published form; `blocks` if the options say nothing of them.

    It reads the hidden states that published drafters read; of a target with few layers fewer.
    """
    hidden, count = target.hidden_size, target.layer_count
    usual = {min(2, count - 1), count // 2, max(count // 2, count - 3)}
    head_size = min(64, hidden)
    return target_sizes(options, target, options.layers or tuple(sorted(usual))) | {
        "blocks": blocks if options.blocks is None else options.blocks,
        "heads": options.heads or hidden // head_size,
        "head_size": head_size,
        "exit_size": options.exit_size or getattr(target.config, "intermediate_size", None) or 4 * hidden,
        "norm_eps": getattr(target.config, "rms_norm_eps", None) or 1e-6,
        "scaled_norms": True,
        "head": options.head,
    }


class Norm(nn.Module):
    """RMS norm, with or without weights."""

    def __init__(self, width: int, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(width)) if config.scaled_norms else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary angles of positions. The frequencies keep their 64 bits when the network changes its dtype."""

    bits: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.head_size
        exact = torch.tensor(
            config.frequencies or [config.rotary_base ** (-i / size) for i in range(0, size, 2)], dtype=torch.float64
        )
        self.scale = config.rotary_scale
        self.register_buffer("bits", exact.view(torch.int64), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Positions (B, n)."""
        exact = torch.promote_types(dtype, torch.float32)
        angle = positions[:, None, :, None] * self.bits.view(torch.float64).to(exact)
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


class DecoderLayer(nn.Module):
    """The weights of one layer over a stream of this width; `reads`: the width that attention reads, if another."""

    def __init__(self, config: DecoderConfig, width: int, reads: int | None = None) -> None:
        super().__init__()
        self.size = config.head_size
        wide, narrow = config.heads * self.size, config.key_heads * self.size
        if reads is None:
            self.norm = Norm(width, config)
        self.query = nn.Linear(reads or width, wide, bias=config.attention_bias)
        self.key = nn.Linear(reads or width, narrow, bias=config.attention_bias)
        self.value = nn.Linear(reads or width, narrow, bias=config.attention_bias)
        self.query_norm = Norm(self.size, config) if config.head_norms else nn.Identity()
        self.key_norm = Norm(self.size, config) if config.head_norms else nn.Identity()
        self.out = nn.Linear(wide, width, bias=config.out_bias)
        self.exit_norm = Norm(width, config)
        self.gate = nn.Linear(width, config.exit_size, bias=False)
        self.up = nn.Linear(width, config.exit_size, bias=False)
        self.down = nn.Linear(config.exit_size, width, bias=False)
        for layer in (self.out, self.down):
            nn.init.zeros_(layer.weight)

    def attention(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """What attention reads (B, n, ·) -> queries (B, heads, n, size), keys and values (B, key heads, n, size)."""
        query = turned(self.query_norm(self._split(self.query(x))), turn)
        return query, *self.memory(x, turn)

    def memory(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """The keys and values alone."""
        return turned(self.key_norm(self._split(self.key(x))), turn), self._split(self.value(x))

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Attention's output (B, heads, n, size) and the MLP, added to the stream (B, n, width)."""
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        x = self.exit_norm(stream)
        after: Tensor = stream + self.down(F.silu(self.gate(x)) * self.up(x))
        return after

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.size).transpose(1, 2)


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Turn the first numbers of each head (B, heads, n, size) by the angles of their positions."""
    cos, sin = turn
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(query: Tensor, *parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention of queries (B, heads, n, size) over several parts: keys, values and visibility (B, n, m) each.

    The result is that of one attention over all parts. The keys in a cache need not be copied next to those of a few
    guesses. Keys and values may have fewer heads, which neighbouring queries share.

    >>> q, k, v = (torch.randn(1, 1, 3, 2) for _ in range(3))
    >>> seen = torch.ones(1, 3, 3, dtype=torch.bool)
    >>> halves = [(k[:, :, a:b], v[:, :, a:b], seen[..., a:b]) for a, b in ((0, 1), (1, 3))]
    >>> torch.allclose(attend(q, *halves), F.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    batch, heads, n, size = query.shape
    shared = heads // parts[0][0].shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, -1, shared * n, size)
    scores = [
        (grouped @ keys.transpose(2, 3))
        .to(exact)
        .view(batch, -1, shared, n, keys.shape[2])
        .masked_fill(~visible[:, None, None], -torch.inf)
        for keys, _, visible in parts
    ]
    weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1).to(query.dtype).flatten(2, 3)
    shares = weights.split([keys.shape[2] for keys, _, _ in parts], -1)
    attended = [share @ values for share, (_, values, _) in zip(shares, parts, strict=True)]
    whole = torch.stack(attended).sum(0) if len(attended) > 1 else attended[0]
    return whole.reshape(batch, heads, n, whole.shape[-1])


def attend_causally(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of a whole text over itself."""
    shared = query.shape[1] > keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=shared)
