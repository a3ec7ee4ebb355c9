"""A model of a large shape that computes what a small one computes: real behaviour at a larger model's cost.

Rule of the whole file: what the small model does not have is exactly zero wherever it could be seen, in the
residual stream and in what `o` and `down` read. So every column that reads such a dimension may hold any
number, and holds a random one: zeros would be read and multiplied with less power than real weights. Zeros
remain only where a real value would otherwise leak into a dimension that must stay zero.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.config import require
from redrafter.errors import UnsupportedTarget

SPREAD = 0.02
"""Of the random numbers: that of freshly made Llama weights, far from overflow in any dtype."""


@dataclass(frozen=True, kw_only=True)
class Wide:
    """The shape of a Llama; head size is hidden / heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int

    def __post_init__(self) -> None:
        require(self.hidden % (2 * self.heads) == 0, f"{self.heads} heads of even size do not make {self.hidden}")
        require(self.heads % self.kv_heads == 0, f"{self.kv_heads} kv heads cannot serve {self.heads} heads alike")

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "vicuna-7b": Wide(hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
    "vicuna-13b": Wide(hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824),
    "vicuna-33b": Wide(hidden=6656, layers=60, heads=52, kv_heads=52, mlp=17920),
    "llama-3-8b": Wide(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
}


def widen(
    model: Any,
    shape: str | Wide,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Any:
    """A `LlamaForCausalLM` of `shape` with the logits of `model`, made directly in `dtype` on `device`.

    Its hidden states are the small ones padded with zeros; added layers change nothing and come last, so a
    hidden state keeps its number. The output embedding is not tied to the input embedding.
    """
    if isinstance(shape, str):
        require(shape in SHAPES, f"unknown shape {shape!r}; use one of {', '.join(SHAPES)} or a Wide")
    wide_shape = SHAPES[shape] if isinstance(shape, str) else shape
    check_llama(model)
    small = model.config
    plan = _Plan(small, wide_shape)
    config = wide_config(small, wide_shape, shape if isinstance(shape, str) else f"hidden {shape.hidden}")
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    wide = empty_model(type(model), config, dtype, device)
    with torch.no_grad():
        plan.fill(wide, model, Filler(device, seed))
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def check_llama(model: Any) -> None:
    """Raise unless the maths of this file is the model's: RMSNorm, SwiGLU, plain rotary positions, no biases."""
    from transformers import LlamaForCausalLM

    name = type(model).__name__
    if not isinstance(model, LlamaForCausalLM):
        raise UnsupportedTarget(f"only a LlamaForCausalLM can be widened, not a {name}")
    config = model.config
    rotary = config.rope_parameters["rope_type"]
    for ok, what in (
        (config.hidden_act == "silu", f"the activation {config.hidden_act}"),
        (not config.attention_bias and not config.mlp_bias, "biases"),
        (rotary == "default", f"{rotary} rotary scaling"),
    ):
        if not ok:
            raise UnsupportedTarget(f"a {name} with {what} cannot be widened")


def wide_config(small: Any, shape: Wide, label: str) -> Any:
    config = copy.deepcopy(small)
    # Mean squares are taken over more dimensions, all of the new ones zero: smaller by this share.
    share = small.hidden_size / shape.hidden
    changes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "intermediate_size": shape.mlp,
        "rms_norm_eps": small.rms_norm_eps * share,
        "rope_parameters": small.rope_parameters | {"rope_theta": rotary_base(small, shape)},
        "tie_word_embeddings": False,
        "_name_or_path": f"{small._name_or_path or small.model_type} as {label}",
        # For the drafter's twin: which of the dimensions and layers are real.
        "widened_from": {"hidden_size": small.hidden_size, "num_hidden_layers": small.num_hidden_layers},
    }
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def rotary_base(small: Any, shape: Wide) -> float:
    """Frequency j of a head of size D is base^(-2j/D): with base^(D/d), the first d/2 are those of size d."""
    return math.pow(small.rope_parameters["rope_theta"], shape.head / small.head_dim)


def empty_model(kind: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Memory for the weights and nothing else: 65 GB must neither pass through the CPU nor exist in fp32."""
    with torch.device("meta"):
        model = kind(config)
    config.dtype = model.config.dtype = dtype
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # its tables are computed, not loaded
    return model


class Filler:
    """Writes small matrices into large ones; everything else becomes random, from one seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def place(
        self,
        wide: Tensor,
        small: Tensor | None,
        rows: Tensor,
        columns: Tensor,
        silent: Tensor | None = None,
        live: Tensor | None = None,
    ) -> None:
        """`small` at rows × columns of `wide`.

        The outputs `silent` give zero, unless they are among `rows`; all others may give anything. Inputs that may
        differ from zero are `live`, those in `columns` if not given.
        """
        wide.normal_(0, SPREAD, generator=self.generator)
        rows, columns = rows.to(wide.device), columns.to(wide.device)
        if silent is not None:
            live = columns if live is None else live.to(wide.device)
            wide[silent.to(wide.device)[:, None], live] = 0
        if small is not None:
            wide[rows[:, None], columns] = small.to(wide)


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """Where one matrix of each layer goes, and which of its outputs must be zero in a real and an added layer."""

    name: str
    rows: Tensor
    columns: Tensor
    silent: Tensor | None = None
    silent_if_added: Tensor | None = None
    live: Tensor | None = None
    source: Tensor | None = None
    """Rows of the small matrix, where some are written more than once."""
    scale: float = 1.0

    def fill(self, layer: Any, small: Any, filler: Filler) -> None:
        """`small`: the layer it comes from, or None for an added one."""
        weight = layer.get_submodule(self.name).weight
        if small is None:
            filler.place(weight, None, self.rows, self.columns, self.silent_if_added)
            return
        own = small.get_submodule(self.name).weight * self.scale
        if self.source is not None:
            own = own[self.source.to(own.device)]
        filler.place(weight, own, self.rows, self.columns, self.silent, self.live)


class _Plan:
    """Where the parts of a small Llama lie in a wide one."""

    def __init__(self, small: Any, shape: Wide) -> None:
        for what, own, wide in (
            ("hidden size", small.hidden_size, shape.hidden),
            ("number of layers", small.num_hidden_layers, shape.layers),
            ("head size", small.head_dim, shape.head),
            ("MLP size", small.intermediate_size, shape.mlp),
        ):
            require(wide >= own, f"a model can only grow: its {what} is {own}, the shape's {wide}")
        self.real_layers = small.num_hidden_layers
        self.hidden = torch.arange(small.hidden_size)
        self.norm_scale = (small.hidden_size / shape.hidden) ** 0.5  # see `share` in `wide_config`
        self.matrices = [*self._attention(small, shape), *self._mlp(small, shape)]

    def _attention(self, small: Any, shape: Wide) -> list[_Matrix]:
        group = small.num_attention_heads // small.num_key_value_heads
        room = shape.heads // shape.kv_heads
        # Query heads that share keys stay together; where a wide group has no room for all, the keys are repeated.
        copies = -(-group // room)
        used = small.num_key_value_heads * copies
        require(used <= shape.kv_heads, f"the model's heads need {used} kv heads, the shape has {shape.kv_heads}")
        query = torch.arange(small.num_attention_heads)
        kv, place = query // group, query % group
        query = (kv * copies + place // room) * room + place % room
        kv = torch.arange(used)
        inside = torch.arange(small.head_dim)
        half = torch.arange(small.head_dim // 2)
        turned = torch.cat([half, half + shape.head // 2])  # rotary positions pair j with j + half a head
        source = _dims(kv // copies, inside, small.head_dim)
        hidden, values = self.hidden, torch.arange(shape.kv_heads * shape.head)
        return [
            _Matrix(
                name="self_attn.q_proj",
                rows=_dims(query, turned, shape.head),
                columns=hidden,
                scale=(shape.head / small.head_dim) ** 0.5,  # attention divides by the root of the head size
            ),
            _Matrix(
                name="self_attn.k_proj",
                rows=_dims(kv, turned, shape.head),
                columns=hidden,
                source=source,
                silent=torch.arange(used * shape.head),  # whatever q holds in these dimensions, it meets zeros
            ),
            _Matrix(
                name="self_attn.v_proj",
                rows=_dims(kv, inside, shape.head),
                columns=hidden,
                source=source,
                silent=values,
                silent_if_added=values,
            ),
            _Matrix(
                name="self_attn.o_proj",
                rows=hidden,
                columns=_dims(query, inside, shape.head),
                silent=torch.arange(shape.hidden),
                # Also a head that only fills up a group attends to that group's values.
                live=_dims(torch.arange(used * room), inside, shape.head),
            ),
        ]

    def _mlp(self, small: Any, shape: Wide) -> list[_Matrix]:
        """`up` and `v` are silent where nothing real is behind them, so that `down` and `o` need not be.

        That takes zeros in the columns of the small hidden size only; in `down` and `o` it would take most of both.
        """
        hidden, own, units = self.hidden, torch.arange(small.intermediate_size), torch.arange(shape.mlp)
        return [
            _Matrix(name="mlp.gate_proj", rows=own, columns=hidden),
            _Matrix(name="mlp.up_proj", rows=own, columns=hidden, silent=units, silent_if_added=units),
            _Matrix(name="mlp.down_proj", rows=hidden, columns=own, silent=torch.arange(shape.hidden)),
        ]

    def fill(self, wide: Any, model: Any, filler: Filler) -> None:
        embedding = wide.model.embed_tokens.weight.zero_()
        embedding[:, : len(self.hidden)] = model.model.embed_tokens.weight.to(embedding)
        head = model.lm_head.weight
        filler.place(wide.lm_head.weight, head, torch.arange(len(head)), self.hidden)
        self._norm(wide.model.norm, model.model.norm)
        for number, layer in enumerate(wide.model.layers):
            small = model.model.layers[number] if number < self.real_layers else None
            self._norm(layer.input_layernorm, small and small.input_layernorm)
            self._norm(layer.post_attention_layernorm, small and small.post_attention_layernorm)
            for matrix in self.matrices:
                matrix.fill(layer, small, filler)

    def _norm(self, wide: Any, small: Any) -> None:
        weight = wide.weight.fill_(1)
        if small is not None:
            weight[: len(self.hidden)] = (small.weight * self.norm_scale).to(weight)


def _dims(heads: Tensor, inside: Tensor, size: int) -> Tensor:
    """(h,) heads, (d,) places inside each -> (h · d,) dimensions.

    >>> _dims(torch.tensor([0, 2]), torch.tensor([0, 1]), 10).tolist()
    [0, 1, 20, 21]
    """
    return (heads[:, None] * size + inside).flatten()
