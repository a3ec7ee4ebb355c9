"""Compiled forwards for modules that many models share, and inputs to compare them with the modules' own forwards.

Each forward falls back to the module's own for inputs that it does not support: many tokens, gradients, another dtype,
another cache. A trial returns the same inputs at each call.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.core.cache import KVCache
from redrafter.kernels.cpu import ops
from redrafter.targets.hf_cache import HFCache

Forward = Callable[..., Any]
Trial = Callable[[nn.Module], tuple[Tensor, dict[str, Any]]]
"""Makes the hidden states for a comparison, and the forward's other arguments."""


def candidates(module: nn.Module) -> Iterator[tuple[Forward, Trial]]:
    """Forwards that may fit a module, judged by its children and parameters; a trial decides whether they do."""
    children = dict(module.named_children())
    parameters = dict(module.named_parameters(recurse=False))
    one_input = len(inspect.signature(type(module).forward).parameters) == 2  # else it may be given a gate too
    if type(module) is nn.Linear:
        yield linear, _trial_of(module)
    elif one_input and not children and list(parameters) == ["weight"] and parameters["weight"].dim() == 1:
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                yield RMSNormForward(name, 0.0), _trial_of(module)
                yield RMSNormForward(name, 1.0), _trial_of(module)
    elif one_input and _linears(children, ("gate_proj", "up_proj", "down_proj"), bias=False):
        yield gated, _trial_of(children["gate_proj"])
    elif (
        _linears(children, ("q_proj", "k_proj", "v_proj", "o_proj"))
        and hasattr(module, "layer_idx")
        and getattr(module, "head_dim", 1) % ops.LANES == 0
        and children["q_proj"].out_features == children["o_proj"].in_features  # else there is a gate among the queries
        and children["k_proj"].out_features == children["v_proj"].out_features
    ):
        yield attention, attention_trial


def _trial_of(first: nn.Module) -> Trial:
    """Three tokens of the width that this module reads."""
    size = weights(first)[0].shape[-1]
    return lambda _: (torch.randn(1, 3, size), {})


def _linears(children: dict[str, nn.Module], names: tuple[str, ...], bias: bool = True) -> bool:
    found = [children.get(name) for name in names]
    return all(type(m) is nn.Linear and (bias or m.bias is None) for m in found)


def weights(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    parameters = module._parameters  # looking up a module's attribute takes as long as a small product
    weight = parameters["weight"]
    assert weight is not None
    return weight, parameters.get("bias")


def linear(self: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = weights(self)
    if ops.usable(input) and ops.readable(weight, bias):
        return ops.linear(input, weight, bias)
    return nn.Linear.forward(self, input)


@dataclass(frozen=True)
class RMSNormForward:
    """x / rms(x) · (weight + offset); `eps` is the name of the module's epsilon attribute."""

    eps: str
    offset: float

    def __call__(self, module: nn.Module, hidden_states: Tensor) -> Tensor:
        weight, _ = weights(module)
        if ops.normable(hidden_states) and ops.readable(weight):
            return ops.rms_norm(hidden_states, weight, self.offset, getattr(module, self.eps))
        own: Tensor = type(module).forward(module, hidden_states)
        return own


def gated(self: Any, x: Tensor) -> Tensor:
    modules = self._modules
    gate, up, down = (weights(modules[name])[0] for name in ("gate_proj", "up_proj", "down_proj"))
    if ops.usable(x) and ops.readable(gate, up, down):
        return ops.gated(x, gate, up, down)
    own: Tensor = type(self).forward(self, x)
    return own


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Queries, keys and values, norms of their heads if any, rotary embedding, KV cache, attention, output."""
    if ops.usable(hidden_states) and isinstance(past_key_values, HFCache) and position_embeddings is not None:
        cache_layer: Any = past_key_values.layers[self.layer_idx]
        stored = cache_layer.kv.layers.get(self.layer_idx)
        modules = self._modules
        each = [weights(modules[name]) for name in ("q_proj", "k_proj", "v_proj")]
        out = weights(modules["o_proj"])
        cos, sin = (x.contiguous() for x in position_embeddings)
        if (
            stored is not None
            and cos.shape[:2] == hidden_states.shape[:2]
            and ops.readable(*out, *(w for pair in each for w in pair))
        ):
            keys, values = stored
            q, k, v = ops.linear3(hidden_states, each)
            batch, n, size = *hidden_states.shape[:2], keys.shape[3]
            if "q_norm" in modules:
                q = modules["q_norm"](q.view(batch, n, -1, size)).flatten(2)
                k = modules["k_norm"](k.view(batch, n, -1, size)).flatten(2)
            queries = q.view(batch, n, -1, size)
            seen = keys[:, :, : cache_layer.extent], values[:, :, : cache_layer.extent]
            if ops.attendable(queries, *seen, attention_mask) and cos.shape[2] == size:
                assert attention_mask is not None
                ops.rotate_and_store(q, k, v, cos, sin, cache_layer.slots.contiguous(), keys, values)
                found = ops.attend(queries, *seen, attention_mask, self.scaling)
                return ops.linear(found.flatten(2), *out), None
    own: tuple[Tensor, Any] = type(self).forward(
        self,
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        **kwargs,
    )
    return own


def attention_trial(module: Any) -> tuple[Tensor, dict[str, Any]]:
    """Two rows with a short text and three nodes each; no node sees another."""
    size = module.head_dim
    heads, layers = module.k_proj.out_features // size, module.layer_idx + 1
    cache = KVCache(slots=12)
    cache.layers[module.layer_idx] = (torch.randn(2, heads, 12, size), torch.randn(2, heads, 12, size))
    slots = torch.tensor([[4, 5, 6], [7, 8, 9]])
    visible = (torch.arange(10) < slots[:, :1, None]) | (torch.arange(10) == slots[:, :, None])
    angles = torch.randn(2, 3, size // 2).repeat(1, 1, 2)
    return torch.randn(2, 3, module.q_proj.in_features), {
        "position_embeddings": (angles.cos(), angles.sin()),
        "attention_mask": torch.zeros(2, 1, 3, 10).masked_fill(~visible[:, None], torch.finfo(torch.float32).min),
        "past_key_values": HFCache(cache, layers, slots, 10),
    }
