"""A target whose passes run over packed weights, each pass as one C++ call.

A token's logits and hidden states have the same bits in every pass: as a node of any tree, in a prompt piece of any
length, beside any other rows.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree
from redrafter.errors import ConfigError
from redrafter.kernels.cpu.model import SCALE_BYTES, PassModel, cache_pointers
from redrafter.kernels.cpu.packed import PackedMatrix
from redrafter.targets.attention import AttentionPlan
from redrafter.targets.cpu.families import Rotations
from redrafter.targets.target import KVLayout, Target

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
POINTERS = "pointers of a packed pass"
KVDtype = Literal["fp32", "fp16", "int8"]
Activations = Literal["fp32", "int8"]
KV_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
"""What keys and values may be kept in."""
ACTIVATIONS = get_args(Activations)
"""What is multiplied with quantised weights."""


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
        self.dtype, self.device = torch.float32, CPU
        self.verifiers = {}
        self.start_times = {}
        self._undo = contextlib.ExitStack()
        self._extra = {"logits_to_keep": 0}
        self._rotations = rotations
        self._load_model = load_model
        self._kv_layout: dict[int, tuple[KVLayout, KVLayout]] = {}
        self.use_kv_dtype("fp32")
        self.use_activations("fp32")

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
        """Multiply quantised weights with activations in fp32, or rounded to int8 with a scale for each 32 of a token.

        Plain and speculative decoding round alike, so their texts are equal; they may differ from those of fp32.
        """
        if name not in ACTIVATIONS:
            raise ConfigError(f"activations can be in {' or '.join(ACTIVATIONS)}, got {name!r}")
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

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | None,
        key_positions: Tensor | None,
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Target.forward`. Without `visible` a token sees all slots up to its own, whose numbers are positions.

        real: (B, n) bool, which tokens to run.
        """
        self._allocate(cache, tokens.shape[0])
        where = np.minimum(positions.numpy(), self.max_positions - 1)  # numpy: torch takes longer for few numbers
        pairs = [cache.layers[i] for i in range(self.layer_count)]
        known = None
        if cache.stays is not None:
            known = cache.stays.get(POINTERS)
            if known is None:
                known = cache.stays[POINTERS] = cache_pointers(pairs)
        return self.packed.run(
            tokens,
            torch.from_numpy(where),
            slots,
            pairs,
            self._rotations.up_to(int(where.max())),
            visible=visible,
            key_positions=key_positions if self.attention.window is not None else None,
            wanted=layers,
            keep=keep,
            known=known,
            rounded=self.activations == "int8",
            real=real,
        )

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `Target.verify`, and empty nodes cost nothing: their logits and hidden states are 0.

        Masks are made by numpy, which takes a tenth of torch's time for so few numbers.
        """
        if self.attention.window is not None:
            return super().verify(tree, lengths, cache, layers)
        start, mask, n = lengths.numpy()[:, None], tree.mask.numpy(), tree.tokens.shape[1]
        visible = np.zeros((len(mask), n, cache.extent), dtype=bool)
        for row, length in enumerate(lengths.tolist()):
            visible[row, :, :length] = True
            visible[row, :, length : length + n] = mask[row, :, : cache.extent - length]
        positions, slots = (torch.from_numpy(start + x) for x in (tree.depths.numpy(), np.arange(n)))
        real = None if tree.valid.numpy().all() else tree.valid
        return self.forward(tree.tokens, positions, slots, torch.from_numpy(visible), None, cache, layers, real=real)

    def _allocate(self, cache: KVCache, rows: int) -> None:
        """Layers of a KV cache that was never written."""
        for layer, pair in self._kv_layout.items():
            if layer not in cache.layers:
                keys, values = (torch.zeros(rows, h, cache.slots, d, dtype=kind) for h, d, kind, _ in pair)
                cache.layers[layer] = (keys, values)

    def read(
        self, tokens: Tensor, start: int, cache: KVCache, layers: tuple[int, ...], keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, n = tokens.shape
        positions = torch.arange(start, start + n).expand(batch, -1)
        return self.forward(tokens, positions, positions, None, None, cache, layers, keep)


def use_rounding(target: Target, kv_dtype: KVDtype, activations: Activations) -> None:
    """`PackedTarget.use_kv_dtype` and `use_activations`; other targets have the model's own dtype for both."""
    if not isinstance(target, PackedTarget):
        refuse_rounding(kv_dtype, activations)
        return
    target.use_kv_dtype(kv_dtype)
    target.use_activations(activations)
    if activations != "fp32":
        log.info("the text is that of %s activations", activations)


def refuse_rounding(kv_dtype: KVDtype, activations: Activations) -> None:
    """Raise ConfigError for what only packed weights have."""
    for option, name in (("kv_dtype", kv_dtype), ("activations", activations)):
        if name != "fp32":
            raise ConfigError(f"{option} {name} is for packed weights on a CPU (GGUF files, q8, q4): leave it out")
