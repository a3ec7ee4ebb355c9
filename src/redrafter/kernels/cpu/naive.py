"""The functions of ops.py in plain torch: the oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def linear3(x: Tensor, each: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    return [F.linear(x, w, b) for w, b in each]


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight + offset, eps)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    batch, n = slots.shape
    size = keys.shape[3]

    def rotated(x: Tensor) -> Tensor:  # (B, n, H·D) -> (B, n, H, D)
        x = x.view(batch, n, -1, size)
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]

    index = slots[:, None, :, None].expand(-1, keys.shape[1], -1, size)
    keys.scatter_(2, index, rotated(k).transpose(1, 2))
    values.scatter_(2, index, v.view(batch, n, -1, size).transpose(1, 2))
    q.copy_(rotated(q).flatten(2))


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def move_path(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    source = lengths[:, None] + path
    target = lengths[:, None] + torch.arange(path.shape[1], device=path.device)

    def over_heads(slots: Tensor) -> Tensor:
        return slots[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])

    cache.scatter_(2, over_heads(target), cache.gather(2, over_heads(source)))
