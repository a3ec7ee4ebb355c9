"""A decoder layer on a GPU: products whose rows have the same bits in every pass, one kernel for each step in between.

    y = x + o(attention(qkv(norm(x)))),  y + down(gate(gate_up(norm(y))))

Gemma 3 and OLMo 2 also norm what is added to x and y. Products are left as partial sums, which the next kernel adds up:
the second norm for `o`, the next layer's first norm for `down`. A layer is recognised by its modules. Its fused pass is
used only if it gives what the layer's own forward gives on random inputs.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, of_pieces
from redrafter.kernels import compiles_only, norm_gate, rotary
from redrafter.kernels.gated_product import gated_product
from redrafter.kernels.norm_gate import Norm
from redrafter.kernels.product import product
from redrafter.targets.cuda.fused_qkv import Replacement
from redrafter.targets.cuda.layer_parts import TRANSFORMERS_HOOKS, CannotFuse, parts_of_layer, relative_gap
from redrafter.targets.cuda.tree_attention import PassThroughCache, active, use_tree_attention
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative difference that rounding explains."""


class FusedLayer:
    """One layer's pass over the tokens of a flat pass."""

    next: "FusedLayer | None" = None
    """The layer that adds this layer's last partial sums to its result; None if this layer adds them itself."""
    pending: tuple[Tensor, Norm | None] | None = None
    """Partial sums of the layer before, still to be added to this layer's input, and the norm of their sum."""

    def __init__(self, layer: Any, stacks: dict[tuple[int, str], Any]) -> None:
        self.parts = parts_of_layer(layer, stacks)
        self.index = self.parts.index

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        p = self.parts
        x, lines = hidden_states[0], attention_mask[0, 0]
        sums, after = self.pending or (None, None)
        self.pending = None
        read = norm_gate.add_norm(x, sums, after, p.before_attention, into=x)
        cos, sin = (a[0] for a in position_embeddings)
        keys, values = active().cache.layers[p.index]
        query = rotary.rotate(product(read, p.qkv.weight, p.qkv.bias), cos, sin, p.heads, keys, values, lines)
        out = active().attend(query, lines, p.index, p.scaling)  # (T, H, D)
        y = torch.empty_like(x)  # x stays: the caller may want the hidden state before this layer
        sums = product(out.flatten(1), p.o.weight)
        read = norm_gate.add_norm(x, sums, p.after_attention, p.before_mlp, into=y)
        inner = gated_product(read, p.gate_up.weight, p.gate_up.bias, p.activation)
        sums = product(inner, p.down.weight)
        if self.next is None:
            norm_gate.add_norm(y, sums, p.after_mlp, None, into=y)
        else:
            self.next.pending = sums, p.after_mlp
        return y.view_as(hidden_states)


@torch.no_grad()
def fuse_layers(target: Target, layers: nn.ModuleList, replacements: list[Replacement]) -> dict[nn.Module, FusedLayer]:
    """Fused passes of the layers that can be fused, each compared with the layer's own forward."""
    stacks = {(id(r.parent), r.name): r.slice.stack for r in replacements}
    found: dict[nn.Module, FusedLayer] = {}
    for layer in layers:
        try:
            made = FusedLayer(layer, stacks)
            if compiles_only() and found:  # all layers run the kernels of the first
                found[layer] = made
                continue
            gap = _trial(target, layer, made)
            if not compiles_only() and not gap <= TOLERANCE.get(target.dtype, 0.0):
                raise CannotFuse(f"its fused pass gives another result (difference {gap:.2g})")
            found[layer] = made
        except Exception as reason:  # a layer with the expected modules but another forward
            log.debug("%s is not fused: %s", type(layer).__name__, reason)
    return found


def defer_sums(layers: Sequence[tuple[nn.Module, FusedLayer]]) -> None:
    """Let each layer leave its last partial sums to the next layer, unless a hook reads the result in between."""
    everywhere = module._global_forward_hooks or module._global_forward_pre_hooks
    for (one, made), (other, after) in pairwise(layers):
        hooks = [*one._forward_hooks.values(), *other._forward_pre_hooks.values()]
        observed = everywhere or any(h.__module__ != TRANSFORMERS_HOOKS for h in hooks)
        made.next = None if observed or after.index != made.index + 1 else after


def _trial(target: Target, layer: Any, made: FusedLayer) -> float:
    """Relative difference of the fused pass and the layer's own, for three tokens after a short text.

    The input is small, so the difference measures what the layer adds to the input.
    """
    heads, of = made.parts.heads, made.parts.o.weight
    random = torch.Generator().manual_seed(made.index)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(of)

    cache = KVCache(slots=8)
    cache.layers[made.index] = tensor(1, heads.keys, 8, heads.size), tensor(1, heads.keys, 8, heads.size)
    flat = of_pieces([Piece(0, 4, [0, 0, 0])], longest=target.max_positions - 1)
    flat = Flat(flat.lines.to(of.device), flat.runs.to(of.device))
    turned = int(heads.size * getattr(target.config, "partial_rotary_factor", 1.0) or heads.size)
    angles = torch.randn(1, 3, turned // 2, generator=random).repeat(1, 1, 2)
    x = tensor(1, 3, of.shape[0]) * 0.01
    given: dict[str, Any] = {
        "attention_mask": flat.lines[None, None],
        "position_embeddings": (angles.cos().to(of), angles.sin().to(of)),
        "past_key_values": PassThroughCache(),
    }
    with use_tree_attention(target, cache):
        active().begin(flat, heads.queries)
        want = type(layer).forward(layer, x, **given)
        alone = made(x, **given)
        made.next = made
        y = made(x, **given).flatten(0, 1)
        assert made.pending is not None
        norm_gate.add_norm(y, *made.pending, None, into=y)
        made.next = made.pending = None
        return max(relative_gap(alone, want), relative_gap(y, want.flatten(0, 1)))
