"""What a decoder layer is made of: its norms, products and activation, found by the names of its modules."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.kernels.norm_gate import Activation, Norm
from redrafter.kernels.rotary import HeadNorms, Heads
from redrafter.targets.cuda.fused_qkv import StackedLinear

TRANSFORMERS_HOOKS = "transformers.utils.output_capturing"
"""The module whose hooks record hidden states and attentions for transformers. A layer's inside needs none of them."""
ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
MLP = ({"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"})
HEAD_NORMS = {"q_norm", "k_norm"}
IN, ATTENDED, MIDDLE, OUT = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ORDERS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset({IN, ATTENDED}): (IN, None, ATTENDED, None),  # Llama
    frozenset({IN, ATTENDED, MIDDLE, OUT}): (IN, ATTENDED, MIDDLE, OUT),  # Gemma 3
    frozenset({ATTENDED, OUT}): (None, ATTENDED, None, OUT),  # OLMo 2
}
"""By the names of a layer's norms: the norms before and after attention, before and after the MLP."""

Stacks = dict[tuple[int, str], StackedLinear]


class CannotFuse(Exception):
    """Why a layer keeps its own forward."""


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer in the order of its pass."""

    before_attention: Norm | None
    qkv: Any  # has a weight and a bias
    heads: Heads
    scaling: float
    o: nn.Linear
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Any
    activation: Activation
    down: nn.Linear
    after_mlp: Norm | None
    index: int

    @property
    def products(self) -> list[Tensor]:
        return [m.weight for m in (self.qkv, self.o, self.gate_up, self.down)]


def parts_of_layer(layer: Any, stacks: Stacks) -> LayerParts:
    """Raises CannotFuse if the layer has other modules, hooks or activations than those known here."""
    children = {name for name, m in layer._modules.items() if not isinstance(m, nn.Dropout)}
    names = ORDERS.get(frozenset(children - {"self_attn", "mlp"}))
    if names is None or not {"self_attn", "mlp"} <= children:
        raise CannotFuse(f"{type(layer).__name__} has other modules")
    attention, mlp = layer.self_attn, layer.mlp
    if set(attention._modules) - HEAD_NORMS not in ATTENTION or set(mlp._modules) not in MLP:
        raise CannotFuse(f"{type(attention).__name__} or {type(mlp).__name__} has other modules")
    _check_hooks(layer)
    norms = [None if name is None else norm_of(getattr(layer, name)) for name in names]
    qkv = stacks.get((id(attention), "q_proj")) or attention._modules.get("qkv_proj")
    gate_up = stacks.get((id(mlp), "gate_proj")) or mlp._modules.get("gate_up_proj")
    for m in (qkv, gate_up):
        if type(m) not in (StackedLinear, nn.Linear):
            raise CannotFuse("not plain linear layers")
    if any(type(m) is not nn.Linear or m.bias is not None for m in (attention.o_proj, mlp.down_proj)):
        raise CannotFuse("not plain linear layers")
    act = mlp._modules.get("act_fn") or mlp._modules.get("activation_fn")
    size = attention.head_dim
    queries = attention.o_proj.in_features // size
    keys = (qkv.weight.shape[0] // size - queries) // 2
    return LayerParts(
        norms[0], qkv, Heads(queries, keys, size, _head_norms(attention, queries, keys, size)), attention.scaling,
        attention.o_proj, norms[1], norms[2], gate_up, _activation(act), mlp.down_proj, norms[3], attention.layer_idx,
    )  # fmt: skip


def _check_hooks(layer: Any) -> None:
    inner = [m for m in layer.modules() if m is not layer]
    own = [h for m in inner for h in m._forward_hooks.values() if h.__module__ != TRANSFORMERS_HOOKS]
    if own or any("forward" in vars(m) or m._forward_pre_hooks for m in layer.modules()):
        raise CannotFuse("a user's hooks or forwards")


@torch.no_grad()
def norm_of(module: Any) -> Norm:
    """An RMS norm module as weight, offset and epsilon, tried on random numbers."""
    names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
    if [name for name, _ in module.named_parameters()] != ["weight"] or not names:
        raise CannotFuse(f"{type(module).__name__} is not an RMS norm")
    x = torch.randn(2, len(module.weight), generator=torch.Generator().manual_seed(0)).to(module.weight.device)
    for offset in (0.0, 1.0):
        norm = Norm(module.weight, offset, getattr(module, names[0]))
        if relative_gap(norm(x), module(x)) < 1e-3:
            return norm
    raise CannotFuse(f"{type(module).__name__} is not an RMS norm")


def _head_norms(attention: Any, queries: int, keys: int, size: int) -> HeadNorms | None:
    if not set(attention._modules) >= HEAD_NORMS:
        return None
    q, k = norm_of(attention.q_norm), norm_of(attention.k_norm)
    widths = len(q.weight), len(k.weight)
    if (q.offset, q.eps) != (k.offset, k.eps) or widths not in ((size, size), (queries * size, keys * size)):
        raise CannotFuse("norms of queries and keys that differ or span some heads")
    return HeadNorms(q.weight, k.weight, q.offset, q.eps)


def _activation(module: Any) -> Activation:
    x = torch.linspace(-4, 4, 99)
    if relative_gap(module(x), F.silu(x)) < 1e-6:
        return "silu"
    if relative_gap(module(x), F.gelu(x, approximate="tanh")) < 1e-6:
        return "gelu_tanh"
    raise CannotFuse(f"{type(module).__name__} is neither SiLU nor GELU")


def relative_gap(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm())
