"""The drafter's layers for a few rows, spelled out in torch: the oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor, normed: bool) -> Tensor:
    """At unit size, if asked for."""
    return F.rms_norm(x, x.shape[-1:]) if normed else x


def block(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    """A residual block: x + silu(W x + b), (..., n) -> (..., n)."""
    return x + F.silu(F.linear(unit(x, normed), weight, bias))


def joint(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    """What states (B, w, s) and readings (B, w, r) add to the share (B, 1, n) that all guesses of a row have."""
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
    """One more token: s = silu(U s + b + heard), or with twice as many rows in U mixed with the old s by a gate.

    With `parents` and `tokens` (B, w), the states are those beams' of the ones given, and `heard` is a table in which
    `places` (V,) says where a token stands; one that is never guessed stands anywhere.
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

    A faint reading stays as it is, a loud one comes at unit size: a long text must not shout.

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
    loud = (found.square().mean(-1, keepdim=True) + 1).rsqrt()
    return (found * loud).flatten(2).to(query.dtype)
