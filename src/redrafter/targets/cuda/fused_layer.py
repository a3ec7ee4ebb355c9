"""A decoder layer on a GPU: library calls for the products, one kernel for each operation between them.

    y = x + o(attention(qkv(norm(x)))),  y + down(gate(gate_up(norm(y))))

A layer takes eight kernels; compiled, it takes thirteen, and compiling takes time. The products `o` and `down` are left
as partial sums. The norm that follows adds them up: the layer's second norm for `o`, the next layer's first norm for
`down`. A layer is recognised by its modules. Its fused pass is used only if it gives what the layer's own forward
gives on random inputs.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module

from redrafter.core.cache import KVCache
from redrafter.kernels import norm_gate
from redrafter.kernels.norm_gate import naive
from redrafter.kernels.tree_attention.naive import Rotary, pack_mask
from redrafter.targets.cuda.fused_qkv import Replacement, StackedLinear
from redrafter.targets.cuda.tree_attention import PassThroughCache, attend, use_tree_attention
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

TRANSFORMERS_HOOKS = "transformers.utils.output_capturing"
"""The module whose hooks record hidden states and attentions for transformers. A layer's inside needs none of them."""
SUBMODULES = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""The names of a layer's modules and of their modules: exactly these, besides norms of queries and keys."""
HEAD_NORMS = {"q_norm", "k_norm"}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative difference that rounding explains."""


class FusedNorm:
    """x / rms(x) · (weight + offset), with the weight and epsilon of a model's norm module."""

    def __init__(self, module: Any) -> None:
        names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
        if [name for name, _ in module.named_parameters()] != ["weight"] or not names:
            raise CannotFuse(f"{type(module).__name__} is not an RMS norm")
        self.weight, self.eps = module.weight, getattr(module, names[0])
        x = torch.randn(2, len(self.weight), generator=torch.Generator().manual_seed(0)).to(self.weight.device)
        want = module(x)
        fits = [o for o in (0.0, 1.0) if _gap(naive.norm(x, self.weight, o, self.eps), want) < 1e-3]
        if not fits:
            raise CannotFuse(f"{type(module).__name__} is not an RMS norm")
        self.offset = fits[0]

    def __call__(self, x: Tensor, parts: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        return norm_gate.norm(x, self.weight, self.offset, self.eps, parts, into)


class CannotFuse(Exception):
    """Why a layer keeps its own forward."""


TILE = 128
"""Columns of a product that one multiprocessor computes."""


def split(x: Tensor, weight: Tensor) -> Tensor:
    """x (n, m) · weight (H, m)ᵀ as partial sums (S, n, H). More than one partial sum is in fp32 on a GPU.

    A product of few rows has too few tiles to fill a GPU. Libraries split it too, and then run one more kernel that
    adds. When splitting pays was measured on an H200 with 1 and 64 rows: as many partial sums as run at once, up to
    four; but only for up to 16 rows if a row of x is no longer than a row of the result.
    """
    n, size = x.shape
    width = len(weight)
    room = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132  # an H200's
    few = n <= (64 if size > width else 16)
    fits = (c for c in (4, 3, 2) if few and c * -(-width // TILE) <= room and size % (16 * c) == 0)
    count = next(fits, 1)
    if count == 1:
        return F.linear(x, weight)[None]
    each, columns = x.view(n, count, -1).transpose(0, 1), weight.view(width, count, -1).permute(1, 2, 0)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(each, columns, out_dtype=torch.float32)
    return torch.bmm(each, columns)


class FusedLayer:
    """One layer's pass over a tree's nodes."""

    next: "FusedLayer | None" = None
    """The layer that adds this layer's last partial sums to its result; None if this layer adds them itself."""
    pending: Tensor | None = None
    """Partial sums of the layer before, still to be added to this layer's input."""

    def __init__(self, layer: Any, stacks: dict[tuple[int, str], StackedLinear]) -> None:
        for name, wanted in SUBMODULES.items():
            part = layer.get_submodule(name)
            if set(part._modules) - HEAD_NORMS != wanted:
                raise CannotFuse(f"{type(part).__name__} has other modules")
        own = [
            h
            for m in layer.modules()
            if m is not layer
            for h in m._forward_hooks.values()
            if h.__module__ != TRANSFORMERS_HOOKS
        ]
        if own or any("forward" in vars(m) or m._forward_pre_hooks for m in layer.modules()):
            raise CannotFuse("a user's hooks or forwards")
        attention, mlp = layer.self_attn, layer.mlp
        found = stacks.get((id(attention), "q_proj")), stacks.get((id(mlp), "gate_proj"))
        outward = attention.o_proj, mlp.down_proj
        if found[0] is None or found[1] is None or any(type(m) is not nn.Linear or m.bias is not None for m in outward):
            raise CannotFuse("not plain linear layers")
        x = torch.linspace(-4, 4, 99)
        if _gap(mlp.act_fn(x), F.silu(x)) > 1e-6:
            raise CannotFuse(f"{type(mlp.act_fn).__name__} is not SiLU")
        self.qkv, self.gate_up = found[0], found[1]
        self.o, self.down = outward
        self.before, self.after = FusedNorm(layer.input_layernorm), FusedNorm(layer.post_attention_layernorm)
        self.index, self.size, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads, self.kv_heads = (m.out_features // self.size for m in (attention.q_proj, attention.k_proj))
        self.head_norms: tuple[Tensor, Tensor, float, float] | None = None
        if set(attention._modules) >= HEAD_NORMS:
            q, k = FusedNorm(attention.q_norm), FusedNorm(attention.k_norm)
            if (q.offset, q.eps, len(q.weight), len(k.weight)) != (k.offset, k.eps, self.size, self.size):
                raise CannotFuse("norms of queries and keys that differ or span several heads")
            self.head_norms = q.weight, k.weight, q.offset, q.eps

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        batch, n, _ = hidden_states.shape
        x = hidden_states.flatten(0, 1)
        qkv = F.linear(self.before(x, self.pending, into=x), self.qkv.weight, self.qkv.bias)
        self.pending = None
        heads = qkv.view(batch, n, -1, self.size).transpose(1, 2)
        query, key, value = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = (a.expand(batch, -1, -1) for a in position_embeddings)
        rotary = Rotary(cos, sin, self.head_norms)
        out = attend(query, key, value, attention_mask, self.index, self.scaling, rotary)
        y = torch.empty_like(x)  # x stays: the caller may want the hidden state before this layer
        after = self.after(x, split(out.view(batch * n, -1), self.o.weight), into=y)
        inner = norm_gate.gate(F.linear(after, self.gate_up.weight, self.gate_up.bias))
        if self.next is None:
            y.addmm_(inner, self.down.weight.t())
        else:
            self.next.pending = split(inner, self.down.weight)
        return y.view_as(hidden_states)


@torch.no_grad()
def fuse_layers(target: Target, layers: nn.ModuleList, replacements: list[Replacement]) -> dict[nn.Module, FusedLayer]:
    """Fused passes of the layers that can be fused, each compared with the layer's own forward."""
    stacks = {(id(r.parent), r.name): r.slice.stack for r in replacements}
    found: dict[nn.Module, FusedLayer] = {}
    for layer in layers:
        try:
            made = FusedLayer(layer, stacks)
            gap = _trial(target, layer, made)
            if not gap <= TOLERANCE.get(target.dtype, 0.0):
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
    """Relative difference of the fused pass and the layer's own, for three nodes after a short text.

    The input is small, so the difference measures what the layer adds to the input.
    """
    of = layer.self_attn.q_proj.weight
    random = torch.Generator().manual_seed(made.index)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(of)

    cache = KVCache(slots=8)
    cache.layers[made.index] = tensor(1, made.kv_heads, 8, made.size), tensor(1, made.kv_heads, 8, made.size)
    depths = torch.arange(3)[None]
    packed = pack_mask(torch.tensor([4]), depths, depths[:, :, None] >= depths[:, None]).to(of.device)
    angles = torch.randn(1, 3, made.size // 2, generator=random).repeat(1, 1, 2)
    x = tensor(1, 3, of.shape[1]) * 0.01
    given: dict[str, Any] = {
        "attention_mask": packed,
        "position_embeddings": (angles.cos().to(of), angles.sin().to(of)),
        "past_key_values": PassThroughCache(),
    }
    with use_tree_attention(target, cache):
        want = type(layer).forward(layer, x, **given)
        alone = made(x, **given)
        made.next = made
        y = made(x, **given).flatten(0, 1)
        made.before(y, made.pending, into=y)
        made.next = made.pending = None
        return max(_gap(alone, want), _gap(y, want.flatten(0, 1)))


def _gap(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm())
