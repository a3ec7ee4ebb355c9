"""The recurrent drafter's network: s = silu(U s + W e + b), g = [s, h, r], residual blocks, softmax.

h is the target's hidden state that chose the last token; it stays the same for all guesses of a step. s has read the
last token and the guesses since. r is read from a memory over the accepted text: linear attention with decay, whose
matrices are M_t = Σ_j γ^(t−j) k_j v_jᵀ over the pairs (hidden state, token it chose) up to t.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import require

EPS = 2.0**-23  # what torch adds to a mean square before the root


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


class Memory(nn.Module):
    """What writes and reads a memory over the accepted text, (B, heads, size, size)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.heads, self.size = config.memory_heads, config.memory_size
        pair = config.context_size + config.embedding_size
        self.key, self.value = (nn.Linear(pair, self.heads * self.size, bias=False) for _ in range(2))
        self.query = nn.Linear(config.state_size, self.heads * self.size, bias=False)
        self.decay = mx.zeros(self.heads)

    def remember(self, memory: mx.array, pair: mx.array, count: mx.array) -> mx.array:
        """Add the first `count` (B,) pairs (B, n, C + E) of a hidden state and the token it chose."""
        key, value = self._unit(self.key(pair)), self._heads(self.value(pair))
        age = count[:, None] - 1 - mx.arange(pair.shape[1])  # (B, n), < 0: not accepted
        weight = mx.where(age[..., None] >= 0, self._power(mx.maximum(age, 0)), 0.0)  # (B, n, heads)
        new = mx.einsum("bnhk,bnhv->bhkv", key.astype(mx.float32) * weight[..., None], value.astype(mx.float32))
        return memory * self._power(count)[..., None, None] + new

    def read(self, memory: mx.array, state: mx.array) -> mx.array:
        """Read each row's memory with the states (B, w, state) -> (B, w, heads · size), about unit size at most."""
        found = mx.einsum("bwhk,bhkv->bwhv", self._unit(self.query(state)).astype(mx.float32), memory)
        found = found * mx.rsqrt(found.square().mean(-1, keepdims=True) + 1)
        return found.reshape(*state.shape[:-1], -1).astype(state.dtype)

    def _power(self, exponent: mx.array) -> mx.array:
        """Exponents (...) -> γ to that power (..., heads)."""
        decay = nn.log_sigmoid(self.decay.astype(mx.float32))
        return mx.exp(decay * exponent[..., None].astype(mx.float32))

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], self.heads, self.size)

    def _unit(self, x: mx.array) -> mx.array:
        x = self._heads(x)
        return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12).astype(x.dtype)


class RecurrentNet(nn.Module):
    """The network without its target. Its weights have the names of redrafter's files."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        state, exit_size = config.state_size, config.exit_size
        wide = 2 * state if config.cell == "gated" else state
        if config.cell != "none":
            self.cell_u = nn.Linear(state, wide)
            self.cell_w = nn.Linear(config.embedding_size, wide, bias=False)
        if config.first_state == "context":
            self.from_context = nn.Linear(config.context_size, state)
        if config.memory_heads:
            self.memory = Memory(config)
        if exit_size != config.joint_size:
            self.input_proj = nn.Linear(config.joint_size, exit_size)
        self.blocks = [nn.Linear(exit_size, exit_size) for _ in range(config.blocks)]
        rows = (config.draft_vocab_size or config.vocab_size) if config.head == "own" else config.embedding_size
        self.head = nn.Linear(exit_size, rows, bias=False)
        all_tokens = config.draft_vocab_size is None
        self.token_ids = None if all_tokens else mx.arange(config.draft_vocab_size)  # (V',) what it guesses among

    def cast(self, dtype: mx.Dtype) -> None:
        """Compute in the target's dtype; only the memory's decay stays in fp32."""
        decay = self.memory.decay if self.config.memory_heads else None
        self.set_dtype(dtype)
        if decay is not None:
            self.memory.decay = decay

    def guess_first(self, most: int) -> None:
        """Guess among the first `most` token ids only, if the head is tied and the first ids are the most frequent.

        Ascending ids are in no order of frequency: older versions of the trainer sorted them.
        """
        ids = self.token_ids
        if ids is not None and ids.size > most and self.config.head == "tied" and mx.any(ids[1:] < ids[:-1]).item():
            self.token_ids = ids[:most]
            self.config = replace(self.config, draft_vocab_size=most)

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
        mixed = self.cell_u(state) + self.cell_w(token)
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
            before = mx.tanh(self.from_context(context))
        return self.next_state(before, token)

    def trunk(self, state: mx.array, context: mx.array, memory: mx.array | None) -> mx.array:
        """The output of the blocks. The context (B, 1, C) is the same for all beams (B, w, state)."""
        joint = [state, mx.broadcast_to(context, (*state.shape[:-1], context.shape[-1]))]
        if memory is not None:
            joint.append(self.memory.read(memory, state))
        x = mx.concatenate(joint, axis=-1)
        if self.config.exit_size != self.config.joint_size:
            x = self.input_proj(x)
        for block in self.blocks:
            x = x + nn.silu(block(self.unit(x)))
        if self.config.normed:  # between unit size and unit length: the vocabulary amplifies each change of x
            x = self.unit(x) * self.config.exit_size**-0.25
        return x

    def empty_memory(self, batch: int) -> mx.array | None:
        """The memory before any token: in fp32, since it is a sum over a whole text."""
        heads, size = self.config.memory_heads, self.config.memory_size
        return mx.zeros((batch, heads, size, size)) if heads else None

    def remember(self, memory: mx.array, hidden: mx.array, tokens: mx.array, count: mx.array) -> mx.array:
        """Add the first `count` (B,) pairs: hidden states (B, n, C), embeddings (B, n, E) of the tokens they chose."""
        pair = mx.concatenate([self.context(hidden), self.unit(tokens)], axis=-1)
        return self.memory.remember(memory, pair, count)
