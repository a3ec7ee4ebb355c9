"""A decoder layer of the kind that the target has, run by transformers, with its keys and values kept by the drafter.

Layers of a multi-token prediction (MTP) module are like those of their model: with latent attention, gated attention,
experts. transformers knows all of these. Only its attention over keys and values is replaced by the drafter's.
"""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from redrafter.errors import UnsupportedDrafter

Attend = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""(queries, keys, values) -> what attention gives (B, heads, n, size); None ends the pass."""
NAME = "redrafter_drafter"
"""Of this attention among those of transformers."""
EXACT = "e_score_correction_bias"
"""Buffers that choose experts: transformers keeps them in fp32, because bf16 would choose others."""
UNKNOWN = ("s_aux", "softcap", "sliding_window")
"""What some models' attention has, and the drafter's has not."""


class _Ended(Exception):
    """`attend` needs no more of this pass."""


class TargetLayer(nn.Module):
    """A layer of transformers, and the rotary positions of its model."""

    def __init__(self, layer: nn.Module, rotary: Any) -> None:
        super().__init__()
        self.layer = layer
        self._rotary = [rotary]  # no submodule: its frequencies keep their bits when the network changes its dtype

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As `nn.Module._apply`, which moves and casts; buffers of EXACT keep their dtype."""
        exact = {name: buffer for name, buffer in self.named_buffers() if name.endswith(EXACT)}
        super()._apply(change, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            path, _, last = name.rpartition(".")
            owner = self.get_submodule(path)
            setattr(owner, last, buffer.to(getattr(owner, last).device))
        return self

    def forward(self, stream: Tensor, positions: Tensor, attend: Attend) -> Tensor | None:
        """Stream (B, n, width) at positions (B, n) -> the stream after the layer; None if `attend` ended it."""
        [rotary] = self._rotary
        turn = rotary.to(stream.device)(stream, positions)
        try:
            given = self.layer(
                stream, position_embeddings=turn, attention_mask=None, position_ids=positions, attend=attend
            )
        except _Ended:
            return None
        after: Tensor = given[0] if isinstance(given, tuple) else given
        return after


def attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    attend: Attend,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention over keys and values."""
    if unknown := [name for name in UNKNOWN if others.get(name) is not None]:
        raise UnsupportedDrafter(f"attention with {unknown[0]} is not read in a drafter")
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # `attend` divides by the root
    attended = attend(query, key, value)
    if attended is None:
        raise _Ended
    return attended.transpose(1, 2), None
