"""A decoder layer as one compiled call.

    y = x + attention(norm(x)),  y + mlp(norm(y))

The layer's modules must have been replaced one by one before (see modules.py). Whether the layer combines them in this
way is decided by a comparison with the layer's own forward.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from redrafter.kernels.cpu import ops
from redrafter.kernels.cpu.block import Block
from redrafter.targets.cpu.modules import Forward, RMSNormForward, Trial, attention, attention_trial, gated, weights
from redrafter.targets.hf_cache import HFCache

NORMS = {"before": "input_layernorm", "after": "post_attention_layernorm"}


def _forward(module: nn.Module | None) -> Any:
    """The compiled forward that replaced a module's own, or None."""
    return getattr(vars(module).get("forward"), "__func__", None) if module is not None else None


class LayerForward:
    """The forward of one layer. It looks its weights up again if they have moved (to another dtype or device)."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._made_of: list[int | None] = []

    @classmethod
    def candidates(cls, layer: nn.Module) -> Iterator[tuple[Forward, Trial]]:
        """This forward, for a layer with exactly the modules it needs."""
        parts = layer._modules
        if set(parts) != {"self_attn", "mlp", *NORMS.values()}:
            return
        known = _forward(parts["self_attn"]) is attention and _forward(parts["mlp"]) is gated
        if not known or not all(isinstance(_forward(parts[name]), RMSNormForward) for name in NORMS.values()):
            return
        yield cls(), lambda _: attention_trial(parts["self_attn"])

    def __call__(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if ops.usable(hidden_states) and isinstance(past_key_values, HFCache) and position_embeddings is not None:
            attention = layer._modules["self_attn"]
            cache_layer: Any = past_key_values.layers[attention.layer_idx]
            stored = cache_layer.kv.layers.get(attention.layer_idx)
            cos, sin = (x.contiguous() for x in position_embeddings)
            block = self._ready(layer)
            if (
                block is not None
                and stored is not None
                and _fits(hidden_states, cos, stored, attention_mask, cache_layer)
            ):
                assert attention_mask is not None
                keys, values = stored
                return block(hidden_states, cos, sin, cache_layer.slots.contiguous(), keys, values, attention_mask)
        return type(layer).forward(
            layer,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )

    def _ready(self, layer: Any) -> Block | None:
        found = _weights(layer)
        at = [None if w is None else w.data_ptr() for w in found.values()]
        if at != self._made_of:
            readable = ops.readable(*found.values())
            self._block = Block(found, _numbers(layer), layer.self_attn.head_dim) if readable else None
            self._made_of = at
        return self._block


def _fits(x: Tensor, cos: Tensor, stored: tuple[Tensor, Tensor], mask: Tensor | None, cache_layer: Any) -> bool:
    """Whether the compiled call takes this mask, these rotary embeddings and this cache; see `ops.attendable`."""
    keys, values = stored
    return (
        mask is not None
        and mask.dtype is keys.dtype is x.dtype
        and mask.shape == (x.shape[0], 1, x.shape[1], cache_layer.extent)
        and mask.stride(3) == 1
        and cos.shape == (*x.shape[:2], keys.shape[3])
        and keys.shape[3] % ops.LANES == 0
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def _weights(layer: nn.Module) -> dict[str, Tensor | None]:
    parts: Any = layer._modules
    attention, mlp = parts["self_attn"]._modules, parts["mlp"]._modules
    found: dict[str, Tensor | None] = {}
    for name in "qkvo":
        found[name], found[name + "_bias"] = weights(attention[name + "_proj"])
    for name in ("q_norm", "k_norm"):
        found[name] = weights(attention[name])[0] if name in attention else None
    for name, module in NORMS.items():
        found[name] = weights(parts[module])[0]
    for name in ("gate", "up", "down"):
        found[name] = weights(mlp[name + "_proj"])[0]
    return found


def _numbers(layer: Any) -> dict[str, float]:
    attention = layer.self_attn
    numbers = {"scale": attention.scaling, "head_eps": 0.0, "head_offset": 0.0}
    norms = {name: layer._modules[module] for name, module in NORMS.items()}
    if "q_norm" in attention._modules:
        norms["head"] = attention.q_norm  # k_norm has the same epsilon and offset, or the comparison fails
    for name, module in norms.items():
        norm = _forward(module)
        numbers |= {f"{name}_eps": getattr(module, norm.eps), f"{name}_offset": norm.offset}
    return numbers
