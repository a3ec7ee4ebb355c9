"""A target whose passes run over packed weights, each pass as one C++ call.

A token's logits and hidden states have the same bits in every pass: as a node of any tree, in a prompt piece of any
length, beside any other rows.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece, of_pieces, on_host
from redrafter.core.recurrence import TextPass, TreePass
from redrafter.core.tree import Tree
from redrafter.errors import ConfigError
from redrafter.kernels.cpu.model import SCALE_BYTES, PassModel, cache_pointers
from redrafter.kernels.cpu.packed import PackedMatrix
from redrafter.kernels.tree_attention.naive import INDEX, PLACE, POSITION, SLOT, SLOTS, TOKEN, padding
from redrafter.targets.attention import AttentionPlan
from redrafter.targets.cpu.families import Rotations
from redrafter.targets.target import PREFILL_CHUNK, KVLayout, Target

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
POINTERS = "pointers of a packed pass"
KVDtype = Literal["fp32", "fp16", "int8"]
Activations = Literal["int16", "int8", "fp32"]
KV_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
"""What keys and values may be kept in."""
ACTIVATIONS: dict[str, int] = {"int16": 16, "int8": 8, "fp32": 0}
"""What is multiplied with quantised weights, and the bits that it is rounded to."""


class PackedEmbedding(nn.Module):
    """An input or output embedding whose rows are unpacked when they are asked for."""

    def __init__(self, matrix: PackedMatrix, scale: float = 1.0) -> None:
        super().__init__()
        self.matrix, self.scale = matrix, scale

    @property
    def weight(self) -> Tensor:
        """The whole matrix in fp32. It is unpacked at each call: ask for `rows` where some are enough."""
        return self.rows(torch.arange(self.matrix.shape[0]))

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix (n, hidden) in fp32."""
        return self.matrix.take(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix.take(tokens) * self.scale


class PackedTarget(Target):
    """A model of one of the families that the compiled pass runs.

    `model` is the same model in transformers, loaded when it is first asked for: training needs it, decoding does not.
    A model that was rounded at load has none.
    """

    same_bits = True

    def __init__(
        self,
        packed: PassModel,
        config: Any,
        tokenizer: Any,
        name: str,
        rotations: Rotations,
        load_model: Callable[[], Any],
        generation_config: Any = None,
    ) -> None:
        self.packed = packed
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self._generation_config = generation_config
        self.attention = AttentionPlan(config)
        self.layer_count = packed.layer_count
        self.hidden_size = packed.sizes.hidden
        self.max_positions = config.max_position_embeddings
        self.input_embedding = PackedEmbedding(packed.embedding, packed.sizes.embedding_scale)
        self.output_embedding = PackedEmbedding(packed.head)
        self.vocab_size = packed.head.shape[0]
        self.dtype = self.precision = torch.float32
        self.device = CPU
        self.verifiers = {}
        self.start_times = {}
        self._undo = contextlib.ExitStack()
        self._extra = {"logits_to_keep": 0}
        self._rotations = rotations
        self._load_model = load_model
        self._kv_layout: dict[int, tuple[KVLayout, KVLayout]] = {}
        self.use_kv_dtype("fp32")
        self.use_activations("int16" if packed.quantised else "fp32")

    def use_kv_dtype(self, name: str) -> None:
        """Keep keys and values in fp32, or rounded: to fp16 in half the memory, or to int8 with a scale for each head.

        KV caches made before stay as they are.
        Plain and speculative decoding round alike, so their texts are equal; they may differ from those of fp32.
        """
        if name not in KV_DTYPES:
            raise ConfigError(f"the KV cache can be in {' or '.join(KV_DTYPES)}, got {name!r}")
        self.kv_dtype = name
        scale = SCALE_BYTES if name == "int8" else 0
        size = (self.packed.sizes.kv_heads, self.packed.sizes.size + scale, KV_DTYPES[name], CPU)
        self._kv_layout = dict.fromkeys(range(self.layer_count), (size, size))

    def use_activations(self, name: str) -> None:
        """Multiply quantised weights with activations rounded to int16 or int8, with a scale for each 32, or in fp32.

        Plain and speculative decoding round alike, so their texts are equal; they may differ from those of fp32.
        """
        if name not in ACTIVATIONS:
            raise ConfigError(f"activations can be in {' or '.join(ACTIVATIONS)}, got {name!r}")
        if name != "fp32" and not self.packed.quantised:
            raise ConfigError(f"activations {name} is for quantised weights, this model's are floats: leave it out")
        self.activations = name

    @functools.cached_property
    def model(self) -> Any:
        return self._load_model()

    @property
    def generation_config(self) -> Any:
        return self._generation_config

    @property
    def weight_bytes(self) -> int:
        return self.packed.weight_bytes

    @property
    def forward_kind(self) -> str:
        rounded = {"KV cache": self.kv_dtype, "activations": self.activations}
        return ", ".join(["packed", *(f"{name} {what}" for what, name in rounded.items() if name != "fp32")])

    def kv_layout(self) -> dict[int, tuple[KVLayout, KVLayout]]:
        return self._kv_layout

    def run_lines(
        self,
        lines: Tensor,
        cache: KVCache,
        layers: tuple[int, ...],
        kept: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A flat pass over lines (T, C) -> logits (V) and hidden states (T, C); see `PassModel.run`."""
        if not cache.layers:
            self._allocate(cache, int(lines[:, PLACE].max()) + 1)
        pairs = [cache.layers[i] for i in range(self.layer_count)]
        known = None
        if cache.stays is not None:
            known = cache.stays.get(POINTERS)
            if known is None:
                known = cache.stays[POINTERS] = cache_pointers(pairs)
        return self.packed.run(
            lines,
            pairs,
            self._rotations.up_to(int(lines.numpy()[:, POSITION].max())),
            wanted=layers,
            kept=kept,
            real=real,
            known=known,
            bits=ACTIVATIONS[self.activations],
        )

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `Target.verify`. Empty nodes cost nothing: their logits and hidden states are 0."""
        logits, hidden, _ = self.verify_and_read(tree, lengths, cache, layers, ())
        return logits, hidden

    def verify_and_read(
        self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...], pieces: Sequence[Piece]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`verify` for the rows at the first places of the cache, and pieces of prompts of any rows in the same pass.

        The third result are the hidden states (P, C) of the pieces' tokens.
        """
        lines, count = on_host(tree, lengths, self.max_positions - 1, pieces)
        every = tree.valid.numel()
        real = None if count == every else tree.valid.flatten()
        logits, hidden = self.run_lines(lines, cache, layers, torch.arange(count) if pieces else None, real)
        nodes, states = hidden[:count], hidden[count:]
        if real is not None:
            nodes = hidden.new_zeros(every, hidden.shape[1])
            nodes[real] = hidden[:count]
        batch, n = tree.tokens.shape
        return logits.view(batch, n, self.vocab_size), nodes.view(batch, n, hidden.shape[1]), states

    def read_pieces(self, pieces: Sequence[Piece], cache: KVCache, layers: tuple[int, ...]) -> Tensor:
        """Read pieces of prompts in few passes -> the hidden states (P, C) of their tokens."""
        lines = of_pieces(pieces, self.max_positions - 1).lines
        none = lines[:0, TOKEN]
        return torch.cat([self.run_lines(some, cache, layers, none)[1] for some in torch.split(lines, PREFILL_CHUNK)])

    def read(
        self,
        tokens: Tensor,
        start: int,
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor,
        counts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        pieces = [Piece(row, start, own) for row, own in enumerate(tokens.tolist())]
        return self._as_rows(of_pieces(pieces, self.max_positions - 1).lines, tokens, cache, layers, keep)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        key_positions: Tensor,  # noqa: ARG002
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor | None = None,
        order: TreePass | TextPass | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """As `Target.forward`. What a token sees is its text up to itself, in the order of the slots."""
        lines = masked_lines(tokens, positions.clamp(max=self.max_positions - 1), slots, visible)
        return self._as_rows(lines, tokens, cache, layers, keep)

    def _as_rows(
        self, lines: Tensor, tokens: Tensor, cache: KVCache, layers: tuple[int, ...], keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A pass over lines of tokens (B, n). `keep` lists the columns whose logits are wanted."""
        batch, n = tokens.shape
        kept = None if keep is None else (torch.arange(batch)[:, None] * n + keep).flatten()
        logits, hidden = self.run_lines(lines, cache, layers, kept)
        return logits.view(batch, -1, self.vocab_size), hidden.view(batch, n, hidden.shape[1])

    def _allocate(self, cache: KVCache, rows: int) -> None:
        """Layers of a KV cache that was never written."""
        for layer, pair in self._kv_layout.items():
            keys, values = (torch.zeros(rows, h, cache.slots, d, dtype=kind) for h, d, kind, _ in pair)
            cache.layers[layer] = (keys, values)


def masked_lines(tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
    """Lines of tokens (B, n) that see the slots `visible` (B, n, S). The order of a text is that of its slots."""
    batch, n, extent = visible.shape
    seen = visible.reshape(batch * n, extent).numpy()
    count, straight = seen.sum(1), np.where(seen.all(1), extent, seen.argmin(1))
    newest = max(1, int((count - straight).max()))
    order = np.argsort(~seen, axis=1, kind="stable")  # the slots that a token sees come first
    back = count[:, None] + np.arange(-newest, 0)
    listed = np.where(back >= 0, np.take_along_axis(order, back.clip(0), 1), -1)
    places = torch.arange(batch).repeat_interleave(n)
    lines = padding(batch * n, newest=newest)
    for column, values in ((TOKEN, tokens), (POSITION, positions), (SLOT, slots), (PLACE, places)):
        lines[:, column] = values.flatten()
    lines[:, INDEX] = torch.from_numpy(count - 1)
    lines[:, SLOTS:] = torch.from_numpy(listed)
    return lines


def use_rounding(target: Target, kv_dtype: KVDtype, activations: Activations | None) -> None:
    """`PackedTarget.use_kv_dtype` and `use_activations`; other targets have the model's own dtype for both."""
    if not isinstance(target, PackedTarget):
        refuse_rounding(kv_dtype, activations)
        return
    target.use_kv_dtype(kv_dtype)
    if activations is not None:
        target.use_activations(activations)
        log.info("the text is that of %s activations", activations)


def refuse_rounding(kv_dtype: KVDtype, activations: Activations | None) -> None:
    """Raise ConfigError for what only packed weights have."""
    for option, name in (("kv_dtype", kv_dtype), ("activations", activations)):
        if name not in ("fp32", None):
            raise ConfigError(f"{option} {name} is for packed weights on a CPU (GGUF files, q8, q4): leave it out")
