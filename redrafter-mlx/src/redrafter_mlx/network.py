"""The recurrent drafter's network: s = silu(U s + W e + b), g = [s, h, r], residual blocks, softmax.

h is the target's hidden state that chose the last token; it stays the same for all guesses of a step. s has read the
last token and the guesses since. r is read from a memory over the accepted text: linear attention with decay, whose
matrices are M_t = Σ_j γ^(t−j) k_j v_jᵀ over the pairs (hidden state, token it chose) up to t.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import require

EPS = 2.0**-23
"""What torch adds to a mean square before the root."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Sizes and variants of a recurrent drafter: the `drafter` entry of redrafter's config.json."""

    vocab_size: int
    context_size: int
    embedding_size: int
    state_size: int
    exit_size: int
    blocks: int = 2
    cell: str = "rnn"
    first_state: str = "embedding"
    head: str = "own"
    draft_vocab_size: int | None = None
    layers: tuple[int, ...] = (-1,)
    normed: bool = False
    memory_heads: int = 0
    memory_size: int = 64

    def __post_init__(self) -> None:
        for name, allowed in (
            ("cell", ("rnn", "gated", "none")),
            ("first_state", ("embedding", "zero", "context")),
            ("head", ("own", "tied")),
        ):
            value = getattr(self, name)
            require(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    @property
    def joint_size(self) -> int:
        """Width of [s, h], plus the memory's output if there is a memory."""
        return self.state_size + self.context_size + self.memory_heads * self.memory_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight."""
        state, context, exit_size = self.state_size, self.context_size, self.exit_size
        wide = 2 * state if self.cell == "gated" else state
        found: dict[str, tuple[int, ...]] = {}
        if self.cell != "none":
            found |= {"cell_u.weight": (wide, state), "cell_u.bias": (wide,)}
            found |= {"cell_w.weight": (wide, self.embedding_size)}
        if self.first_state == "context":
            found |= {"from_context.weight": (state, context), "from_context.bias": (state,)}
        if self.memory_heads:
            out = self.memory_heads * self.memory_size
            pair = context + self.embedding_size
            found |= {"memory.key.weight": (out, pair), "memory.value.weight": (out, pair)}
            found |= {"memory.query.weight": (out, state), "memory.decay": (self.memory_heads,)}
        if exit_size != self.joint_size:
            found |= {"input_proj.weight": (exit_size, self.joint_size), "input_proj.bias": (exit_size,)}
        for i in range(self.blocks):
            found |= {f"blocks.{i}.weight": (exit_size, exit_size), f"blocks.{i}.bias": (exit_size,)}
        rows = (self.draft_vocab_size or self.vocab_size) if self.head == "own" else self.embedding_size
        found["head.weight"] = (rows, exit_size)
        if self.draft_vocab_size is not None:
            found["token_ids"] = (self.draft_vocab_size,)
        return found


class RecurrentNet:
    """A drafter's weights and their arithmetic."""

    def __init__(self, config: RecurrentConfig, weights: dict[str, mx.array]) -> None:
        self.config, self.weights = config, weights
        self._parts: list[mx.array] | None = None

    @property
    def token_ids(self) -> mx.array | None:
        """(V',) the token ids it guesses among; None: all of them."""
        return self.weights.get("token_ids")

    def cast(self, dtype: mx.Dtype) -> None:
        """Compute in the target's dtype; only the memory's decay stays in fp32."""
        self._parts = None
        for name, weight in self.weights.items():
            if name == "token_ids":
                self.weights[name] = weight.astype(mx.int32)
            elif name != "memory.decay":
                self.weights[name] = weight.astype(dtype)

    def guess_first(self, most: int) -> None:
        """Guess among the first `most` token ids only, if the head is tied and the first ids are the most frequent.

        Ascending ids are in no order of frequency: older versions of the trainer sorted them.
        """
        ids = self.token_ids
        if ids is not None and ids.size > most and self.config.head == "tied" and mx.any(ids[1:] < ids[:-1]).item():
            self.weights["token_ids"] = ids[:most]
            self.config = replace(self.config, draft_vocab_size=most)

    def linear(self, x: mx.array, name: str) -> mx.array:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def unit(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, EPS) if self.config.normed else x

    def context(self, hidden: mx.array) -> mx.array:
        """Hidden states of the target (..., context), normalised layer by layer if the network is `normed`."""
        count = len(self.config.layers)
        each = hidden.reshape(*hidden.shape[:-1], count, self.config.context_size // count)
        return self.unit(each).reshape(hidden.shape)

    def next_state(self, state: mx.array, token: mx.array) -> mx.array:
        """States (..., state) after one more token with this embedding."""
        if self.config.cell == "none":
            return token + state
        mixed = self.linear(state, "cell_u") + self.linear(token, "cell_w")
        if self.config.cell == "rnn":
            return nn.silu(mixed)
        candidate, gate = mx.split(mixed, 2, axis=-1)
        return state + mx.sigmoid(gate) * (nn.silu(candidate) - state)

    def first_state(self, token: mx.array, context: mx.array) -> mx.array:
        """The state after the last token, before any guess."""
        if self.config.first_state == "embedding":
            return token
        if self.config.first_state == "zero":
            before = mx.zeros((*token.shape[:-1], self.config.state_size), dtype=token.dtype)
        else:
            before = mx.tanh(self.linear(context, "from_context"))
        return self.next_state(before, token)

    def trunk(self, state: mx.array, context: mx.array, reading: mx.array | None) -> mx.array:
        """The output of the blocks. The context (B, 1, C) is the same for all beams (B, w, state)."""
        config, weights = self.config, self.weights
        if "input_proj.weight" in weights:
            of_state, of_context, of_reading = self._projection()
            x = state @ of_state.T + (context @ of_context.T + weights["input_proj.bias"])
            if reading is not None:
                x = x + reading @ of_reading.T
        else:
            wide = mx.broadcast_to(context, (*state.shape[:-1], context.shape[-1]))
            x = mx.concatenate([state, wide] + ([] if reading is None else [reading]), axis=-1)
        for i in range(config.blocks):
            x = x + nn.silu(self.linear(self.unit(x), f"blocks.{i}"))
        if config.normed:  # between unit size and unit length: the vocabulary amplifies each change of x
            x = self.unit(x) * config.exit_size**-0.25
        return x

    def _projection(self) -> list[mx.array]:
        """The columns of the input projection for the state, the context and the memory's output, each contiguous."""
        if self._parts is None:
            split = [self.config.state_size, self.config.state_size + self.config.context_size]
            self._parts = [mx.contiguous(part) for part in mx.split(self.weights["input_proj.weight"], split, axis=1)]
        return self._parts

    def logits(self, x: mx.array, output: Callable[[mx.array], mx.array]) -> mx.array:
        """The trunk's output -> logits over V'; `output` multiplies by the target's output embedding."""
        x = self.linear(x, "head")
        return output(x) if self.config.head == "tied" else x

    def empty_memory(self, batch: int) -> mx.array | None:
        """The memory before any token: (B, heads, size, size) in fp32, since it is a sum over a whole text."""
        heads, size = self.config.memory_heads, self.config.memory_size
        return mx.zeros((batch, heads, size, size)) if heads else None

    def remember(self, memory: mx.array, hidden: mx.array, tokens: mx.array, count: mx.array) -> mx.array:
        """Add the first `count` (B,) pairs: hidden states (B, n, C), embeddings (B, n, E) of the tokens they chose."""
        pair = mx.concatenate([self.context(hidden), self.unit(tokens)], axis=-1)
        key = self._heads(self.linear(pair, "memory.key"), unit=True)
        value = self._heads(self.linear(pair, "memory.value"))
        age = count[:, None] - 1 - mx.arange(pair.shape[1])  # (B, n), < 0: not accepted
        weight = mx.where(age[..., None] >= 0, self._power(mx.maximum(age, 0)), 0.0)  # (B, n, heads)
        new = mx.einsum("bnhk,bnhv->bhkv", key.astype(mx.float32) * weight[..., None], value.astype(mx.float32))
        return memory * self._power(count)[..., None, None] + new

    def read(self, memory: mx.array, state: mx.array) -> mx.array:
        """Read each row's memory with the states (B, w, state) -> (B, w, heads · size), about unit size at most."""
        query = self._heads(self.linear(state, "memory.query"), unit=True).astype(mx.float32)
        found = mx.einsum("bwhk,bhkv->bwhv", query, memory)
        found = found * mx.rsqrt(found.square().mean(-1, keepdims=True) + 1)
        return found.reshape(*state.shape[:-1], -1).astype(state.dtype)

    def _power(self, exponent: mx.array) -> mx.array:
        """Exponents (...) -> γ to that power (..., heads)."""
        decay = nn.log_sigmoid(self.weights["memory.decay"].astype(mx.float32))
        return mx.exp(decay * exponent[..., None].astype(mx.float32))

    def _heads(self, x: mx.array, unit: bool = False) -> mx.array:
        x = x.reshape(*x.shape[:-1], self.config.memory_heads, self.config.memory_size)
        if not unit:
            return x
        return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12).astype(x.dtype)
