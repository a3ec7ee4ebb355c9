"""A decoder layer whose parts are all known, as one compiled call.

    y = x + attention(norm(x)),  y + mlp(norm(y))

Its parts must have been recognised one by one before (see forwards.py); that they are put together in this way is
again for a trial to say.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from redrafter.kernels.cpu import ops
from redrafter.kernels.cpu.block import Block
from redrafter.targets.cpu.modules import Forward, Norm, Trial, attention, attention_trial, gated, weights
from redrafter.targets.hf_cache import WornCache

NORMS = {"before": "input_layernorm", "after": "post_attention_layernorm"}


def _forward(module: nn.Module | None) -> Any:
    """The compiled forward that has taken a module's own's place, if one has."""
    return getattr(vars(module).get("forward"), "__func__", None) if module is not None else None


class LayerForward:
    """The forward of one layer. Weights that have moved since (another dtype, another device) are looked up anew."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._made_of: list[int | None] = []

    @classmethod
    def candidates(cls, layer: nn.Module) -> Iterator[tuple[Forward, Trial]]:
        """For a layer of just these parts."""
        parts = layer._modules
        if set(parts) != {"self_attn", "mlp", *NORMS.values()}:
            return
        known = _forward(parts["self_attn"]) is attention and _forward(parts["mlp"]) is gated
        if not known or not all(isinstance(_forward(parts[name]), Norm) for name in NORMS.values()):
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
        if ops.usable(hidden_states) and isinstance(past_key_values, WornCache) and position_embeddings is not None:
            attention = layer._modules["self_attn"]
            worn: Any = past_key_values.layers[attention.layer_idx]
            stored = worn.kv.layers.get(attention.layer_idx)
            cos, sin = (x.contiguous() for x in position_embeddings)
            block = self._ready(layer)
            if block is not None and stored is not None and _fits(hidden_states, cos, stored, attention_mask, worn):
                assert attention_mask is not None
                keys, values = stored
                return block(hidden_states, cos, sin, worn.slots.contiguous(), keys, values, attention_mask)
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
            readable = ops.readable(*(w for w in found.values() if w is not None))
            self._block = Block(found, _numbers(layer), layer.self_attn.head_dim) if readable else None
            self._made_of = at
        return self._block


def _fits(x: Tensor, cos: Tensor, stored: tuple[Tensor, Tensor], mask: Tensor | None, worn: Any) -> bool:
    """As `ops.attendable`, for what this cache and this model bring along."""
    keys, values = stored
    return (
        mask is not None
        and mask.dtype is keys.dtype is x.dtype
        and mask.shape == (x.shape[0], 1, x.shape[1], worn.extent)
        and mask.stride(3) == 1
        and cos.shape == (*x.shape[:2], keys.shape[3])
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
        norms["head"] = attention.q_norm  # of the same kind as k_norm, or the trial fails
    for name, module in norms.items():
        norm = _forward(module)
        numbers |= {f"{name}_eps": getattr(module, norm.eps), f"{name}_offset": norm.offset}
    return numbers
