"""A decoder layer on a GPU: products by the library, and what stands between them a kernel each.

    y = x + o(attention(qkv(norm(x)))),  y + down(gate(gate_up(norm(y))))

Eight kernels, where a compiler makes thirteen and takes its time for it. The two products that end in a sum are left in
parts, and the norm that reads the sum adds them up: the one in the middle, or the next layer's first, which completes
the hidden state before it in its place. A layer is recognised by what it is made of, and its fused pass trusted only
after it gave what the layer's own forward gives on random inputs.
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
from redrafter.targets.cuda.fused_qkv import Joint, Stand
from redrafter.targets.cuda.tree_attention import PassingCache, attend, served
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

HOOKS = "transformers.utils.output_capturing"
"""Who hangs hooks into a model's modules, for outputs that nobody asks for here."""
PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""A layer's parts and theirs, by name: these and no others, but for norms of queries and keys."""
OF_HEADS = {"q_norm", "k_norm"}
SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative difference that rounding explains."""


class Norm:
    """x / rms(x) · (weight + offset), as a module of a model has it."""

    def __init__(self, module: Any) -> None:
        names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
        if [name for name, _ in module.named_parameters()] != ["weight"] or not names:
            raise Unknown(f"{type(module).__name__} is no norm we know")
        self.weight, self.eps = module.weight, getattr(module, names[0])
        x = torch.randn(2, len(self.weight), generator=torch.Generator().manual_seed(0)).to(self.weight.device)
        want = module(x)
        fits = [o for o in (0.0, 1.0) if _gap(naive.norm(x, self.weight, o, self.eps), want) < 1e-3]
        if not fits:
            raise Unknown(f"{type(module).__name__} is no norm we know")
        self.offset = fits[0]

    def __call__(self, x: Tensor, parts: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        return norm_gate.norm(x, self.weight, self.offset, self.eps, parts, into)


class Unknown(Exception):
    """Why a layer keeps its own forward."""


TILE = 128
"""Columns of a result that one multiprocessor makes."""


def split(x: Tensor, weight: Tensor) -> Tensor:
    """x (n, m) · weight (H, m)ᵀ as parts (S, n, H) that are to be summed up; on a GPU several of them are in fp32.

    A product of few rows has too few tiles for a GPU. A library splits it as well, and then runs a kernel that adds.
    Where it is worth it was measured on an H200 for 1 and 64 rows: with as many parts as find room at once, up to four,
    but only for very few rows where a row is no longer than the result's.
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
    """The pass of one layer over a tree's nodes."""

    next: "FusedLayer | None" = None
    """Who completes this one's result, which is in parts until then."""
    owed: Tensor | None = None
    """What this one's input still lacks, and gets here."""

    def __init__(self, layer: Any, joints: dict[tuple[int, str], Joint]) -> None:
        for name, wanted in PARTS.items():
            part = layer.get_submodule(name)
            if set(part._modules) - OF_HEADS != wanted:
                raise Unknown(f"{type(part).__name__} has other parts")
        own = [h for m in layer.modules() if m is not layer for h in m._forward_hooks.values() if h.__module__ != HOOKS]
        if own or any("forward" in vars(m) or m._forward_pre_hooks for m in layer.modules()):
            raise Unknown("others' hooks or forwards")
        attention, mlp = layer.self_attn, layer.mlp
        found = joints.get((id(attention), "q_proj")), joints.get((id(mlp), "gate_proj"))
        outward = attention.o_proj, mlp.down_proj
        if found[0] is None or found[1] is None or any(type(m) is not nn.Linear or m.bias is not None for m in outward):
            raise Unknown("not plain linear layers")
        x = torch.linspace(-4, 4, 99)
        if _gap(mlp.act_fn(x), F.silu(x)) > 1e-6:
            raise Unknown(f"{type(mlp.act_fn).__name__} is not SiLU")
        self.qkv, self.gate_up = found[0], found[1]
        self.o, self.down = outward
        self.before, self.after = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.index, self.size, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads, self.kv_heads = (m.out_features // self.size for m in (attention.q_proj, attention.k_proj))
        self.of_heads: tuple[Tensor, Tensor, float, float] | None = None
        if set(attention._modules) >= OF_HEADS:
            q, k = Norm(attention.q_norm), Norm(attention.k_norm)
            if (q.offset, q.eps, len(q.weight), len(k.weight)) != (k.offset, k.eps, self.size, self.size):
                raise Unknown("norms of queries and keys that differ, or are not of single heads")
            self.of_heads = q.weight, k.weight, q.offset, q.eps

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        batch, n, _ = hidden_states.shape
        x = hidden_states.flatten(0, 1)
        qkv = F.linear(self.before(x, self.owed, into=x), self.qkv.weight, self.qkv.bias)
        self.owed = None
        heads = qkv.view(batch, n, -1, self.size).transpose(1, 2)
        query, key, value = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = (a.expand(batch, -1, -1) for a in position_embeddings)
        turn = Rotary(cos, sin, self.of_heads)
        out = attend(query, key, value, attention_mask, self.index, self.scaling, turn)
        y = torch.empty_like(x)  # the hidden state before this layer may be wanted
        after = self.after(x, split(out.view(batch * n, -1), self.o.weight), into=y)
        inner = norm_gate.gate(F.linear(after, self.gate_up.weight, self.gate_up.bias))
        if self.next is None:
            y.addmm_(inner, self.down.weight.t())
        else:
            self.next.owed = split(inner, self.down.weight)
        return y.view_as(hidden_states)


@torch.no_grad()
def fused(target: Target, layers: nn.ModuleList, stands: list[Stand]) -> dict[nn.Module, FusedLayer]:
    """The layers that can be fused, each tried."""
    joints = {(id(parent), name): part.joint for parent, name, _, part in stands}
    found: dict[nn.Module, FusedLayer] = {}
    for layer in layers:
        try:
            made = FusedLayer(layer, joints)
            gap = _trial(target, layer, made)
            if not gap <= SAME.get(target.dtype, 0.0):
                raise Unknown(f"its fused pass gives something else (difference {gap:.2g})")
            found[layer] = made
        except Exception as reason:  # a layer that only looks like one we know
            log.debug("%s is not fused: %s", type(layer).__name__, reason)
    return found


def hand_over(layers: Sequence[tuple[nn.Module, FusedLayer]]) -> None:
    """Let each layer that nobody else looks at leave its last sum to the one after it."""
    everywhere = module._global_forward_hooks or module._global_forward_pre_hooks
    for (one, made), (other, after) in pairwise(layers):
        hooks = [*one._forward_hooks.values(), *other._forward_pre_hooks.values()]
        looked_at = everywhere or any(h.__module__ != HOOKS for h in hooks)
        made.next = None if looked_at or after.index != made.index + 1 else after


def _trial(target: Target, layer: Any, made: FusedLayer) -> float:
    """How far apart the two passes are, over three nodes behind a little text.

    The input is small, so that what the layer adds to it is what is compared.
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
        "past_key_values": PassingCache(),
    }
    with served(target, cache):
        want = type(layer).forward(layer, x, **given)
        alone = made(x, **given)
        made.next = made
        y = made(x, **given).flatten(0, 1)
        made.before(y, made.owed, into=y)
        made.next = made.owed = None
        return max(_gap(alone, want), _gap(y, want.flatten(0, 1)))


def _gap(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm())
