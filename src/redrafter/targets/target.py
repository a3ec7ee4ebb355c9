"""A transformers causal LM that verifies trees."""

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.recurrence import RecurrentMemory, TextPass, TreePass
from redrafter.core.tree import Tree
from redrafter.errors import UnsupportedTarget
from redrafter.targets.attention import AttentionPlan
from redrafter.targets.by_position import scaled, scaling_attentions
from redrafter.targets.media_tokens import media_tokens
from redrafter.targets.quantised.linear import rounds
from redrafter.targets.tree_levels import tree_levels

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from redrafter.targets.hf_cache import HFCache
    from redrafter.targets.recurrence import Recurrence

log = logging.getLogger(__name__)

PREFILL_CHUNK = 512
"""Prompt tokens per pass. Bounds the memory for masks and activations of a long prompt."""

ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends for passes of varying length. cuDNN's is left out: planning a new length takes it longer
than the pass itself."""

UNBOUNDED = 1 << 20
"""Context length of a model whose config has none (relative positions only)."""


KVLayout = tuple[int, int, torch.dtype, torch.device]
"""KV heads, head size, dtype and device of one layer's keys, or of its values."""


class TargetInfo(Protocol):
    """What a drafter has to know about a target, whether redrafter or another engine runs it."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def input_embedding(self) -> Any: ...
    @property
    def output_embedding(self) -> Any: ...


class Target:
    """A causal LM of transformers that verifies trees. `selfcheck.check` decides whether it may be used.

    Faster paths change the model while a target uses it (see `targets/cpu`, `targets/cuda`). Code that
    changes the model registers how to undo the change with `on_release`; `release` undoes all changes.
    """

    same_bits = False
    """Whether a token's logits have the same bits in every pass."""
    media_tokens: Mapping[int, str] = {}
    """Token ids that stand for images, videos or sounds, which no prompt may have."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name: str = name or getattr(model.config, "_name_or_path", "") or self.config.model_type
        self.attention = AttentionPlan(self.config)
        self.scales = scaling_attentions(model)
        self.media_tokens = media_tokens(model.config)
        self.layer_count: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or UNBOUNDED
        self.input_embedding = model.get_input_embeddings()
        self.output_embedding = model.get_output_embeddings()
        if self.output_embedding is None:
            raise UnsupportedTarget(f"{type(model).__name__} is no causal LM: it has no output embedding")
        self.vocab_size: int = self.output_embedding.weight.shape[0]
        self.dtype: torch.dtype = model.dtype
        coarse = rounds(model) and self.dtype != torch.float64
        self.precision: torch.dtype = torch.bfloat16 if coarse else self.dtype  # how far two passes may differ
        self.device: torch.device = self.input_embedding.weight.device
        self.verifiers: dict[bool, Any] = {}  # checked and compiled once for all engines that share this target
        self.start_times: dict[str, float] = {}  # seconds of what comes before the first tokens, see `timed`
        from redrafter.targets.hf_cache import HFCache  # imports transformers, which packed weights do not need

        self._hf_cache = HFCache
        self._undo = contextlib.ExitStack()
        self._kv_layout: dict[int, tuple[KVLayout, KVLayout]] = {}
        self._extra: dict[str, int | Tensor] = {}
        takes = inspect.signature(model.forward).parameters
        if "logits_to_keep" in takes:
            self._extra["logits_to_keep"] = 0
        self._cache_name = "cache_params" if "cache_params" in takes else "past_key_values"

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a recurrent state."""
        return self.attention.recurrent

    @functools.cached_property
    def recurrence(self) -> "Recurrence":
        """How the layers with a recurrent state run; a pass over one token shows which they are."""
        from redrafter.targets.recurrence import Recurrence  # imports transformers, see above
        from redrafter.targets.recurrence_check import reads_together

        self.recurrence = Recurrence(self.model, self.config, self._cache_name)
        self.recurrence.together = reads_together(self)
        return self.recurrence

    @property
    def generation_config(self) -> Any:
        """The model's own; a user may replace it at any time."""
        return getattr(self.model, "generation_config", None)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def forward_kind(self) -> str:
        """Which passes run: the model's `original` ones, or those of a faster path that `replaced` some of them."""
        return "replaced" if any("forward" in vars(module) for module in self.model.modules()) else "original"

    @functools.cached_property
    def _one_token(self) -> KVCache:
        """The cache of one row of one token, by a pass over it."""
        sample = KVCache(slots=1)
        with torch.no_grad():
            self.prefill(torch.zeros(1, 1, dtype=torch.long, device=self.device), [1], sample, ())
        return sample

    def kv_layout(self) -> dict[int, tuple[KVLayout, KVLayout]]:
        """What each layer keeps in the KV cache, keys and values."""
        if not self._kv_layout:
            for layer, pair in self._one_token.layers.items():
                keys, values = ((x.shape[1], x.shape[3], x.dtype, x.device) for x in pair)
                self._kv_layout[layer] = (keys, values)
        return self._kv_layout

    def state_of_row(self) -> RecurrentMemory:
        """The recurrent state of one row, as an example of its size."""
        return self._one_token.recurrent if self.recurrent else RecurrentMemory()

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds inside to those of this stage of the start."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.start_times[stage] = self.start_times.get(stage, 0.0) + seconds
            log.debug("%s: %s took %.2f s", self.name, stage, seconds)

    def on_release(self, undo: Callable[[], Any]) -> None:
        """Register the undoing of a change to the model. `release` undoes the latest change first."""
        self._undo.callback(undo)

    def release(self) -> None:
        """Hand the model back as it came: own forwards, parameters in their own storage, attention, training mode.

        The target must not be used afterwards, nor a graph that was recorded with it. A second call does nothing.
        """
        self.verifiers.clear()
        self._undo.close()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor | None = None,
        order: TreePass | TextPass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over (B, n) tokens -> logits (B, n or len(keep), V), hidden states (B, n, C).

        `visible` (B, n, S) says which of the first S slots each token sees, `key_positions` (B, S) gives
        the positions of the tokens in these slots. `keep` lists the columns whose logits are wanted. `order`
        says which token follows which, for layers with a recurrent state.
        """
        if self.recurrent and order is None:
            raise UnsupportedTarget(
                f"{self.name} keeps a recurrent state: it verifies trees and reads texts, but cannot go on after every "
                "token of a text at once; leave out --local"
            )
        masks = self.attention.masks(visible, positions, key_positions, self.dtype)
        hf_cache = self.new_hf_cache(cache, slots, visible.shape[2], order=order)
        with contextlib.nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(ANY_LENGTH):
            return self.run(tokens, self.clamp_positions(positions), masks, hf_cache, layers, keep)

    def new_hf_cache(
        self,
        cache: KVCache,
        slots: Tensor,
        extent: int,
        length: int | None = None,
        order: TreePass | TextPass | None = None,
    ) -> "HFCache":
        """Our cache in the form that the model takes, for one pass."""
        kind = self.recurrence.cache_class if self.recurrent else self._hf_cache
        return kind(cache, self.layer_count, slots, extent, length, order)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Tensor | dict[str, Tensor],
        cache: "Cache",
        layers: tuple[int, ...],
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The model's own forward, with masks and a cache in the form that the model takes."""
        extra = dict(self._extra)
        if keep is not None and extra:
            extra["logits_to_keep"] = keep
        running = self.recurrence.running() if self.recurrent else contextlib.nullcontext()
        with scaled(self.scales, positions), running:
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks,
                use_cache=True,
                output_hidden_states=len(layers) > 0,
                **{self._cache_name: cache},
                **extra,
            )
        logits = out.logits.to(self.device)
        if keep is not None and not extra:
            logits = logits[:, keep]
        if not layers:
            return logits, logits.new_zeros(*tokens.shape, 0)
        return logits, torch.cat([out.hidden_states[i].to(self.device) for i in layers], dim=-1)

    def clamp_positions(self, positions: Tensor) -> Tensor:
        """Positions that exist. A draft token past the context is never accepted, but still has a position."""
        return positions.clamp(max=self.max_positions - 1)

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """All nodes in one pass: logits (B, N+1, V) and hidden states (B, N+1, C)."""
        node = torch.arange(tree.tokens.shape[1], device=lengths.device)
        return self.forward(
            tree.tokens,
            lengths[:, None] + tree.depths,
            lengths[:, None] + node,
            tree_visibility(lengths, tree.mask, cache.extent),
            slot_positions(lengths, tree.depths, cache.extent),
            cache,
            layers,
            order=tree_levels(tree, lengths) if self.recurrent else None,
        )

    def prefill(
        self, tokens: Tensor, lengths: list[int], cache: KVCache, layers: tuple[int, ...], begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Prompts (B, P), padded right -> logits (B, V) after each row's last token, hidden states (B, P, C).

        The KV cache already holds `begin` tokens of every row, which come before these.
        """
        batch, total = tokens.shape
        last: dict[int, Tensor] = {}
        hidden = []
        for start in range(0, total, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, total)
            ends = sorted({n - 1 - start for n in lengths if start < n <= stop})
            keep = torch.tensor(ends or [0], device=self.device)
            counts = [min(max(n - start, 0), stop - start) for n in lengths]
            logits, states = self.read(tokens[:, start:stop], begin + start, cache, layers, keep, counts)
            hidden.append(states)
            for row, n in enumerate(lengths):
                if start < n <= stop:
                    last[row] = logits[row, ends.index(n - 1 - start)]
        return torch.stack([last[row] for row in range(batch)]), torch.cat(hidden, dim=1)

    def read(
        self,
        tokens: Tensor,
        start: int,
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over the tokens (B, n) behind the first `start` of every row; `keep` as in `forward`.

        counts: how many of its tokens each row has, by default all; the others are padding.
        """
        batch, width = tokens.shape
        stop = start + width
        positions = torch.arange(start, stop, device=self.device).expand(batch, -1)
        slots = torch.arange(stop, device=self.device).expand(batch, -1)
        visible = slots[:, None, :] <= positions[:, :, None]
        order = TextPass([width] * batch if counts is None else counts, start)
        return self.forward(tokens, positions, positions, visible, slots, cache, layers, keep, order)

    def states(self, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Whole texts (B, S), padded right -> hidden states (B, S, C), by one causal pass without a KV cache."""
        extra = {"logits_to_keep": 1} if self._extra else {}
        with sdpa_kernel(ANY_LENGTH):
            out = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True, **extra)
        return torch.cat([out.hidden_states[i].to(self.device) for i in layers], dim=-1)
