"""The recurrent drafter's network: s = silu(U s + W e + b), g = [s, h], residual blocks, softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.config import RecurrentConfig
from redrafter.kernels.drafter_layers import block, cell, joint, narrow
from redrafter.nets.memory import Memory


class RecurrentNet(nn.Module):
    """Guesses a token from the state s, which has read the tokens since, and the context h.

    h is the target's hidden state that chose the last token; it stays the same for all guesses of
    a step. The embeddings e are the target's own, given from outside. With a memory, g = [s, h, r]
    where r is what s reads there.
    """

    token_ids: Tensor | None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        state, context = config.state_size, config.context_size
        if config.cell != "none":
            wide = 2 * state if config.cell == "gated" else state
            self.cell_u = nn.Linear(state, wide)
            self.cell_w = nn.Linear(config.embedding_size, wide, bias=False)
        if config.first_state == "context":
            self.from_context = nn.Linear(context, state)
        self.memory = None
        if config.memory_heads:
            self.memory = Memory(config.memory_heads, config.memory_size, context + config.embedding_size, state)
        joint = config.joint_size
        self.input_proj = nn.Linear(joint, config.exit_size) if config.exit_size != joint else None
        self.blocks = nn.ModuleList(nn.Linear(config.exit_size, config.exit_size) for _ in range(config.blocks))
        out = config.guessable if config.head == "own" else config.embedding_size
        self.head = nn.Linear(config.exit_size, out, bias=False)
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("token_ids", ids)

    def context(self, hidden: Tensor) -> Tensor:
        """The target's hidden states (..., context) as the rest of the network wants them."""
        count = len(self.config.layers)
        each = hidden.reshape(*hidden.shape[:-1], count, self.config.context_size // count)
        return self._unit(each).flatten(-2)

    def token(self, embedding: Tensor) -> Tensor:
        """The target's embeddings (..., embedding), likewise."""
        return self._unit(embedding)

    def _unit(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) if self.config.normed else x

    def heard(self, token: Tensor) -> Tensor:
        """What reading a token (..., embedding) adds to the cell, whatever the state."""
        return token if self.config.cell == "none" else self.cell_w(token)

    def next_state(self, state: Tensor, heard: Tensor) -> Tensor:
        """States (..., state) that read one more token."""
        if self.config.cell == "none":
            return heard + state
        if narrow(state):
            new: Tensor = cell(state, self.cell_u.weight, self.cell_u.bias, heard)
            return new
        mixed = self.cell_u(state) + heard
        if self.config.cell == "rnn":
            return F.silu(mixed)
        candidate, gate = mixed.chunk(2, dim=-1)
        return torch.lerp(state, F.silu(candidate), torch.sigmoid(gate))

    def first_state(self, token: Tensor, context: Tensor) -> Tensor:
        """The state that has read the last token only."""
        if self.config.first_state == "embedding":
            return token
        if self.config.first_state == "zero":
            before = token.new_zeros(*token.shape[:-1], self.config.state_size)
        else:
            before = torch.tanh(self.from_context(context))
        return self.next_state(before, self.heard(token))

    def share(self, context: Tensor) -> Tensor:
        """What the context adds to every guess of a step, computed once: (..., exit), or itself if not projected."""
        if self.input_proj is None:
            return context
        return self.columns(context, self.config.state_size, self.input_proj.bias)

    def columns(self, x: Tensor, start: int, bias: Tensor | None = None) -> Tensor:
        """x times those columns of the projection that begin at `start`."""
        assert self.input_proj is not None
        return F.linear(x, self.input_proj.weight[:, start : start + x.shape[-1]], bias)

    def features(self, state: Tensor, share: Tensor, reading: Tensor | None = None) -> Tensor:
        """States, shares of the context and readings of the memory -> what the vocabulary is multiplied with."""
        return self.project(self.trunk(state, share, reading))

    def project(self, x: Tensor) -> Tensor:
        """The blocks' result in the width of the vocabulary's rows."""
        return self.head(x) if self.config.head == "tied" else x

    def trunk(self, state: Tensor, share: Tensor, reading: Tensor | None = None) -> Tensor:
        """The same before the head."""
        if self.input_proj is None:
            x = torch.cat([state, share.expand(*state.shape[:-1], -1)] + ([] if reading is None else [reading]), dim=-1)
        elif narrow(state) and share.shape[-2] == 1:  # a beam; in training each position has its own
            last = None if reading is None else self.input_proj.weight[:, -reading.shape[-1] :]
            x = joint(state, self.input_proj.weight[:, : state.shape[-1]], share, reading, last)
        else:
            x = self.columns(state, 0) + share
            if reading is not None:
                x = x + self.columns(reading, self.config.joint_size - reading.shape[-1])
        for layer in self.blocks:
            if narrow(x):
                x = block(x, layer.weight, layer.bias, self.config.normed)
            else:
                x = x + F.silu(layer(self._unit(x)))
        if (
            self.config.normed
        ):  # between unit size and unit length: what an update changes here, the vocabulary amplifies
            x = self._unit(x) * self.config.exit_size**-0.25
        return x

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        """Rows (V', n) that features become logits with: the target's own for a tied head."""
        return self.head.weight if self.config.head == "own" else output_embedding
