"""Widen a small Llama: build a model of a larger shape that computes the same logits at the larger model's cost.

Added dimensions are exactly zero in the residual stream and in the inputs of `o_proj` and `down_proj`. A weight column
that reads an added dimension therefore has no effect, and is filled with random numbers: a GPU draws less power on
zeros, so zeros would make the timing unrealistic. Weights are zero only where a real value would otherwise leak into an
added dimension.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.config import require
from redrafter.errors import UnsupportedTarget

INITIAL_STD = 0.02
"""Standard deviation of the random weights: the value that transformers initialises a Llama with."""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model. The head size is hidden / heads."""

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
    "vicuna-7b": LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
    "vicuna-13b": LlamaShape(hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824),
    "vicuna-33b": LlamaShape(hidden=6656, layers=60, heads=52, kv_heads=52, mlp=17920),
    "llama-3-8b": LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
}
"""Shapes of published models."""


def widen(
    model: Any,
    shape: str | LlamaShape,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Any:
    """Return a `LlamaForCausalLM` of `shape` with the logits of `model`, allocated in `dtype` on `device`.

    Its hidden states are those of `model`, padded with zeros. Added layers are identity functions after the real
    layers, so layer indices stay valid. The output embedding is not tied to the input embedding.
    """
    if isinstance(shape, str):
        require(shape in SHAPES, f"unknown shape {shape!r}; use one of {', '.join(SHAPES)} or a LlamaShape")
    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    check_llama(model)
    small = model.config
    layout = _LlamaLayout(small, sizes)
    config = wide_config(small, sizes, shape if isinstance(shape, str) else f"hidden {shape.hidden}")
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    wide = empty_model(type(model), config, dtype, device)
    with torch.no_grad():
        layout.fill(wide, model, MatrixPadder(device, seed))
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def check_llama(model: Any) -> None:
    """Raise unless the model is a Llama with SiLU, default rotary embeddings and no biases."""
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


def wide_config(small: Any, shape: LlamaShape, label: str) -> Any:
    config = copy.deepcopy(small)
    # RMSNorm averages over the added zeros too, which scales every mean square by this factor.
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
        # Read by the functions that widen a drafter for this target.
        "widened_from": {"hidden_size": small.hidden_size, "num_hidden_layers": small.num_hidden_layers},
    }
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def rotary_base(small: Any, shape: LlamaShape) -> float:
    """Return the rotary base for the wide head size D that keeps the frequencies of the small head size d.

    Frequency j is base^(-2j/D). With base^(D/d), the first d/2 frequencies equal those of head size d.
    """
    return math.pow(small.rope_parameters["rope_theta"], shape.head / small.head_dim)


def empty_model(kind: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate the weights on the device without initialising them: 65 GB must not pass through the CPU or fp32."""
    with torch.device("meta"):
        model = kind(config)
    config.dtype = model.config.dtype = dtype
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # its tables are computed, not loaded
    return model


class MatrixPadder:
    """Writes small matrices into large ones and fills the rest with random numbers from one seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def pad(
        self,
        wide: Tensor,
        small: Tensor | None,
        rows: Tensor,
        columns: Tensor,
        zero_rows: Tensor | None = None,
        nonzero_columns: Tensor | None = None,
    ) -> None:
        """Write `small` to rows × columns of `wide`; everything else becomes random or zero.

        The outputs in `zero_rows` must be zero unless they are among `rows`; other outputs may have any value. Only the
        inputs in `nonzero_columns` (default: `columns`) can differ from zero.
        """
        wide.normal_(0, INITIAL_STD, generator=self.generator)
        rows, columns = rows.to(wide.device), columns.to(wide.device)
        if zero_rows is not None:
            nonzero_columns = columns if nonzero_columns is None else nonzero_columns.to(wide.device)
            wide[zero_rows.to(wide.device)[:, None], nonzero_columns] = 0
        if small is not None:
            wide[rows[:, None], columns] = small.to(wide)


@dataclass(frozen=True, kw_only=True)
class _MatrixLayout:
    """Where a matrix of the small layer goes in the wide layer, and which outputs must be zero."""

    name: str
    rows: Tensor
    columns: Tensor
    zero_rows: Tensor | None = None
    zero_rows_if_added: Tensor | None = None
    nonzero_columns: Tensor | None = None
    source: Tensor | None = None
    """Rows of the small matrix to write, if some are repeated (default: each row once)."""
    scale: float = 1.0

    def fill(self, layer: Any, small: Any, padder: MatrixPadder) -> None:
        """Fill the matrix of `layer` from the layer `small`, or as an identity layer if `small` is None."""
        weight = layer.get_submodule(self.name).weight
        if small is None:
            padder.pad(weight, None, self.rows, self.columns, self.zero_rows_if_added)
            return
        own = small.get_submodule(self.name).weight * self.scale
        if self.source is not None:
            own = own[self.source.to(own.device)]
        padder.pad(weight, own, self.rows, self.columns, self.zero_rows, self.nonzero_columns)


class _LlamaLayout:
    """Where each weight of a small Llama goes in the wide model."""

    def __init__(self, small: Any, shape: LlamaShape) -> None:
        for what, own, wide in (
            ("hidden size", small.hidden_size, shape.hidden),
            ("number of layers", small.num_hidden_layers, shape.layers),
            ("head size", small.head_dim, shape.head),
            ("MLP size", small.intermediate_size, shape.mlp),
        ):
            require(wide >= own, f"widen cannot shrink a model: its {what} is {own}, the shape's {wide}")
        self.real_layers = small.num_hidden_layers
        self.hidden = torch.arange(small.hidden_size)
        self.norm_scale = (small.hidden_size / shape.hidden) ** 0.5  # see `rms_norm_eps` in `wide_config`
        self.matrices = [*self._attention(small, shape), *self._mlp(small, shape)]

    def _attention(self, small: Any, shape: LlamaShape) -> list[_MatrixLayout]:
        group = small.num_attention_heads // small.num_key_value_heads
        room = shape.heads // shape.kv_heads
        # Query heads that share a KV head stay in one group; if a wide group is too small, the KV head is repeated.
        copies = -(-group // room)
        used = small.num_key_value_heads * copies
        require(used <= shape.kv_heads, f"the model's heads need {used} kv heads, the shape has {shape.kv_heads}")
        query = torch.arange(small.num_attention_heads)
        kv, place = query // group, query % group
        query = (kv * copies + place // room) * room + place % room
        kv = torch.arange(used)
        inside = torch.arange(small.head_dim)
        half = torch.arange(small.head_dim // 2)
        turned = torch.cat(
            [half, half + shape.head // 2]
        )  # rotary embeddings pair dimension j with j + half the head size
        source = _dimensions(kv // copies, inside, small.head_dim)
        hidden, values = self.hidden, torch.arange(shape.kv_heads * shape.head)
        return [
            _MatrixLayout(
                name="self_attn.q_proj",
                rows=_dimensions(query, turned, shape.head),
                columns=hidden,
                scale=(shape.head / small.head_dim) ** 0.5,  # attention divides by the square root of the head size
            ),
            _MatrixLayout(
                name="self_attn.k_proj",
                rows=_dimensions(kv, turned, shape.head),
                columns=hidden,
                source=source,
                zero_rows=torch.arange(used * shape.head),  # random values of q in these dimensions multiply zeros
            ),
            _MatrixLayout(
                name="self_attn.v_proj",
                rows=_dimensions(kv, inside, shape.head),
                columns=hidden,
                source=source,
                zero_rows=values,
                zero_rows_if_added=values,
            ),
            _MatrixLayout(
                name="self_attn.o_proj",
                rows=hidden,
                columns=_dimensions(query, inside, shape.head),
                zero_rows=torch.arange(shape.hidden),
                # An added query head in a real group reads that group's values.
                nonzero_columns=_dimensions(torch.arange(used * room), inside, shape.head),
            ),
        ]

    def _mlp(self, small: Any, shape: LlamaShape) -> list[_MatrixLayout]:
        """Zero the added rows of `up_proj` and `v_proj`; the added columns of `down_proj` and `o_proj` can be random.

        The zeros then fill only the columns of the small hidden size; zeroing `down_proj` and `o_proj` instead would
        zero most of both matrices.
        """
        hidden, own, units = self.hidden, torch.arange(small.intermediate_size), torch.arange(shape.mlp)
        return [
            _MatrixLayout(name="mlp.gate_proj", rows=own, columns=hidden),
            _MatrixLayout(name="mlp.up_proj", rows=own, columns=hidden, zero_rows=units, zero_rows_if_added=units),
            _MatrixLayout(name="mlp.down_proj", rows=hidden, columns=own, zero_rows=torch.arange(shape.hidden)),
        ]

    def fill(self, wide: Any, model: Any, padder: MatrixPadder) -> None:
        embedding = wide.model.embed_tokens.weight.zero_()
        embedding[:, : len(self.hidden)] = model.model.embed_tokens.weight.to(embedding)
        head = model.lm_head.weight
        padder.pad(wide.lm_head.weight, head, torch.arange(len(head)), self.hidden)
        self._norm(wide.model.norm, model.model.norm)
        for number, layer in enumerate(wide.model.layers):
            small = model.model.layers[number] if number < self.real_layers else None
            self._norm(layer.input_layernorm, small and small.input_layernorm)
            self._norm(layer.post_attention_layernorm, small and small.post_attention_layernorm)
            for matrix in self.matrices:
                matrix.fill(layer, small, padder)

    def _norm(self, wide: Any, small: Any) -> None:
        weight = wide.weight.fill_(1)
        if small is not None:
            weight[: len(self.hidden)] = (small.weight * self.norm_scale).to(weight)


def _dimensions(heads: Tensor, inside: Tensor, size: int) -> Tensor:
    """Return the dimensions (h · d,) of the offsets `inside` (d,) of each head in `heads` (h,).

    >>> _dimensions(torch.tensor([0, 2]), torch.tensor([0, 1]), 10).tolist()
    [0, 1, 20, 21]
    """
    return (heads[:, None] * size + inside).flatten()
