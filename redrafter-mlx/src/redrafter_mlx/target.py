"""An mlx-lm model that verifies trees, without a change to its code or its weights.

The model gets our KV cache in place of its own. Two kinds of its modules get another `__call__` until the target is
released: rotary embeddings, so that each tree node gets its own position, and decoder layers whose hidden states the
drafter reads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from redrafter_mlx import checkpoint
from redrafter_mlx.cache import TreeCache
from redrafter_mlx.errors import DrafterMismatch, UnsupportedTarget
from redrafter_mlx.network import RecurrentConfig
from redrafter_mlx.tree import Tree, padded

PIECE = 512  # prompt tokens of a pass. Bounds the memory for the activations of a long prompt
UNBOUNDED = 1 << 20  # context length of a model whose config has none


class Target:
    """A causal LM of mlx-lm. `selfcheck.check` decides whether it may be used."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "") -> None:
        self.model, self.tokenizer = model, tokenizer
        args = getattr(model, "args", None)
        self.kind = str(getattr(model, "model_type", None) or getattr(args, "model_type", type(model).__name__))
        self.name = name or self.kind
        self.windows = attention_windows(model, self.name)
        self.max_positions: int = getattr(args, "max_position_embeddings", None) or UNBOUNDED
        body = next((m for _, m in model.named_modules() if owns(m, model.layers)), None)
        embeddings = [] if body is None else [m for m in body.children().values() if isinstance(m, EMBEDDINGS)]
        if body is None or not embeddings:
            raise UnsupportedTarget(f"{self.name} has no token embedding beside its layers: redrafter cannot read it")
        self.body, self.embedding = body, embeddings[0]
        heads = [m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head"]
        self.output_embedding = heads[0] if heads else self.embedding
        self.vocab_size, self.quantised = self.output_embedding.weight.shape[0], hasattr(self.output_embedding, "bits")
        self.layer_count = len(model.layers)
        self.layers: tuple[int, ...] = ()
        self.seen: dict[int, mx.array] = {}  # hidden states of the current pass, by layer
        self._changed: list[tuple[Any, type]] = []
        for _, module in model.named_modules():
            if "rope" in type(module).__name__.lower():
                self._wrap(module, rotate_nodes)
        probe = self.embed(mx.array([[0]]))
        self.hidden_size, self.dtype = int(probe.shape[-1]), probe.dtype
        self.precision = f"q{self.output_embedding.bits}" if self.quantised else str(self.dtype).split(".")[-1]

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids -> input embeddings, as transformers' embedding of the same model gives them."""
        found = self.embedding(tokens)
        return found * found.shape[-1] ** 0.5 if self.kind.startswith("gemma") else found

    def output_rows(self, ids: mx.array | None) -> Callable[[mx.array], mx.array]:
        """x -> x times the output embedding's rows of these tokens, on the model's own quantised weights if it has."""
        rows, options = self._output_rows(slice(None) if ids is None else ids)
        if not self.quantised:
            return lambda x: x @ rows[0].T
        return lambda x: mx.quantized_matmul(x, *rows, transpose=True, **options)

    def _output_rows(self, ids: mx.array | slice) -> tuple[list[Any], dict[str, Any]]:
        """Rows of the output embedding: weight; of a quantised one scales and biases too, and what mx needs to know."""
        head = self.output_embedding
        if not self.quantised:
            return [head.weight[ids]], {}
        rows = [None if part is None else part[ids] for part in (head.weight, head.scales, head.get("biases"))]
        return rows, {"group_size": head.group_size, "bits": head.bits, "mode": getattr(head, "mode", "affine")}

    def identity(self) -> dict[str, str]:
        """What a drafter's config says about the target it was made for; see `checkpoint.identity`."""
        rows, options = self._output_rows(mx.arange(0, self.vocab_size, max(1, self.vocab_size // 64)))
        whole = mx.dequantize(*rows, **options) if self.quantised else rows[0]
        vocabulary = None if self.tokenizer is None else self.tokenizer.get_vocab()
        return checkpoint.identity(vocabulary, np.array(whole.astype(mx.float32)))

    def check_sizes(self, config: RecurrentConfig) -> None:
        """Raise unless a drafter of these sizes can read this target."""
        for layer in config.layers:
            if not -self.layer_count - 1 <= layer <= self.layer_count:
                raise DrafterMismatch(
                    f"the drafter reads hidden state {layer}, but {self.name} has {self.layer_count} layers"
                )
        for what, drafter, own in (
            ("a vocabulary of", config.vocab_size, self.vocab_size),
            ("a context of", config.context_size, self.hidden_size * len(config.layers)),
            ("embeddings of", config.embedding_size, self.hidden_size),
        ):
            if drafter != own:
                raise DrafterMismatch(f"the drafter expects {what} {drafter}, but the target {self.name} has {own}")

    def record(self, layers: tuple[int, ...]) -> None:
        """Let passes return these hidden states, as transformers numbers them (-1: after the final norm)."""
        if layers == self.layers:
            return  # a further engine of the same target
        for layer in layers:
            place = layer % (self.layer_count + 1)
            module = self.body if place == self.layer_count else self.model.layers[place]
            self._wrap(module, partial(self._record, place))
        self.layers = layers

    def _record(self, place: int, call: Callable[..., Any], x: mx.array, *args: Any, **options: Any) -> Any:
        """Keep what goes into a decoder layer or, for the last hidden state, what comes out of the body."""
        found = call(x, *args, **options)
        self.seen[place] = found if place == self.layer_count else x
        return found

    def _wrap(self, module: Any, around: Callable[..., Any]) -> None:
        """Let a module answer calls with `around(call, ...)`, where `call` is its own answer. Nothing else changes."""
        kind = type(module)
        self._changed.append((module, kind))

        def call(module: Any, *args: Any, **options: Any) -> Any:
            return around(partial(kind.__call__, module), *args, **options)

        object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"__call__": call}))

    def release(self) -> None:
        """Hand the model back as it came. A second call does nothing."""
        while self._changed:
            module, kind = self._changed.pop()
            object.__setattr__(module, "__class__", kind)

    def make_cache(self, rows: int = 1, shift: int = 0) -> TreeCache:
        return TreeCache(self.windows, [0] * rows, shift)

    def run(self, tokens: mx.array, cache: TreeCache, tree: Tree | None = None) -> tuple[mx.array, mx.array | None]:
        """A pass over tokens (B, n) -> logits (B, n, V) and hidden states (B, n, C), None if no layer is recorded.

        The tokens are neighbours, or the nodes of a tree, whose keys stay behind the text until `cache.commit`.
        """
        alone = len(cache.lengths) == 1 and tokens.shape[1] == 1  # a row's root alone is a neighbour
        cache.tree = None if alone else tree
        logits = self.model(tokens, cache=cache.layers)
        hidden = [self.seen[layer % (self.layer_count + 1)] for layer in self.layers]
        return logits, mx.concatenate(hidden, axis=-1) if hidden else None

    def read(self, texts: Sequence[list[int]], cache: TreeCache) -> list[mx.array]:
        """Read more tokens of rows that are equally long, piece by piece -> hidden states (B, n, C) of each piece.

        Shorter texts are padded. What is behind a row's own tokens is never seen, and overwritten later.
        """
        start, tokens, pieces = cache.start, padded(texts), []
        for begin in range(0, tokens.shape[1], PIECE):
            cache.lengths = [start + begin] * len(texts)
            _, hidden = self.run(tokens[:, begin : begin + PIECE], cache)
            pieces += [] if hidden is None else [hidden]
            mx.eval(cache.state, pieces[-1:])  # not the logits: nothing computes them
        cache.lengths = [start + len(text) for text in texts]
        return pieces


EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


def owns(module: Any, layers: Sequence[Any]) -> bool:
    """Whether this module holds the model's list of decoder layers."""
    mine = module.get("layers") if isinstance(module, dict) else None
    return isinstance(mine, list) and bool(mine) and mine[0] is layers[0]


def attention_windows(model: Any, name: str) -> list[int | None]:
    """The sliding window of each layer, from the caches that the model makes for itself."""
    windows: list[int | None] = []
    for own in make_prompt_cache(model):
        if type(own) is KVCache:
            windows.append(None)
        elif type(own) is RotatingKVCache and not own.keep:
            windows.append(own.max_size)
        else:
            raise UnsupportedTarget(
                f"{name} keeps a {type(own).__name__}, not keys and values alone: a recurrent state cannot follow "
                "several paths of a tree at once"
            )
    return windows


def rotate_nodes(call: Callable[..., mx.array], x: mx.array, *args: Any, **options: Any) -> mx.array:
    """Let a rotary embedding take a position for each token, (B, n): mx.fast.rope takes one for each row."""
    offset = args[0] if args else options.get("offset")
    if not isinstance(offset, mx.array) or offset.ndim != 2:
        return call(x, *args, **options)
    batch, heads, n, size = x.shape
    rows = x.swapaxes(1, 2).reshape(batch * n, heads, 1, size)
    found = call(rows, **options | {"offset": offset.reshape(-1)})
    return found.reshape(batch, n, heads, size).swapaxes(1, 2)
