"""The recurrent drafter's layers in plain torch: the oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor, normed: bool) -> Tensor:
    """x scaled to unit size if `normed`."""
    return F.rms_norm(x, x.shape[-1:]) if normed else x


def block(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    """A residual block: x + silu(W x + b), (..., n) -> (..., n)."""
    return x + F.silu(F.linear(unit(x, normed), weight, bias))


def joint(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    """The input layer of states (B, w, s), readings (B, w, r): W s + columns · reading + the row's share (B, 1, n)."""
    x = F.linear(state, weight) + share
    return x if reading is None or columns is None else x + F.linear(reading, columns)


def cell(
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    heard: Tensor,
    parents: Tensor | None = None,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """The state after one more token: silu(U s + b + heard). If U has twice as many rows, a gate mixes it with s.

    With `parents` and `tokens` (B, w), the states are those of the parents, and `heard` is a table: row `places[v]` is
    token v's. A token that is never drafted may have any row.
    """
    if parents is not None:
        assert tokens is not None
        assert places is not None
        state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[2]))
        heard = heard[places[tokens]]
    mixed = F.linear(state, weight, bias) + heard
    if weight.shape[0] == state.shape[-1]:
        return F.silu(mixed)
    new, gate = mixed.chunk(2, dim=-1)
    return torch.lerp(state, F.silu(new), torch.sigmoid(gate))


def read(query: Tensor, memory: Tensor) -> Tensor:
    """Queries (B, w, heads · size), made unit vectors, read memories (B, heads, size, size) -> (B, w, heads · size).

    A small reading stays nearly as it is, a large one is scaled to unit size, so that long texts do not dominate.

    >>> eye = torch.eye(2)[None, None]
    >>> read(torch.tensor([[[2.0, 0.0]]]), eye * 0.5).mul(100).round().tolist()
    [[[47.0, 0.0]]]
    >>> read(torch.tensor([[[3.0, 4.0]]]), eye * 5000).mul(100).round().tolist()
    [[[85.0, 113.0]]]
    """
    batch, width, _ = query.shape
    heads, size = memory.shape[1:3]
    unit_query = F.normalize(query.view(batch, width, heads, size), dim=-1).to(query.dtype)
    found = torch.einsum("bwhk,bhkv->bwhv", unit_query.to(memory.dtype), memory)
    damping = (found.square().mean(-1, keepdim=True) + 1).rsqrt()
    return (found * damping).flatten(2).to(query.dtype)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., n) as int8, and one fp32 scale (...) for each row.

    >>> rounded(torch.tensor([[1.0, -0.25], [0.0, 0.0]]))[0].tolist()
    [[127, -32], [0, 0]]
    """
    wide = x.float()
    scale = (wide.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[..., None]).round().to(torch.int8), scale


def head(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits in `dtype` of x (..., n) over a vocabulary (V', n), both in int8 with one fp32 scale for each row."""
    return (F.linear(x.double(), weight.double()) * scale * x_scale[..., None]).to(dtype)
