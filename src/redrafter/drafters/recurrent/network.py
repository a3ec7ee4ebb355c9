"""The recurrent drafter's network: s = silu(U s + W e + b), g = [s, h], residual blocks, softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters.base import DrafterNet
from redrafter.drafters.recurrent.config import RecurrentConfig
from redrafter.drafters.recurrent.memory import Memory
from redrafter.kernels.drafter_layers import block, cell, joint, narrow


class RecurrentNet(DrafterNet):
    """Guesses a token from the context h and the state s.

    h is the target's hidden state that chose the last token; it stays the same for all guesses of a step. s has read
    the last token and the guesses since. The embeddings e of these tokens are the target's own and are passed in. With
    a memory, g = [s, h, r], where r is the memory's output for s.
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
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

    def context(self, hidden: Tensor) -> Tensor:
        """Hidden states of the target (..., context), normalised if the network is `normed`."""
        count = len(self.config.layers)
        each = hidden.reshape(*hidden.shape[:-1], count, self.config.context_size // count)
        return self._unit(each).flatten(-2)

    def token(self, embedding: Tensor) -> Tensor:
        """Embeddings of the target (..., embedding), normalised if the network is `normed`."""
        return self._unit(embedding)

    def _unit(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) if self.config.normed else x

    def token_input(self, token: Tensor) -> Tensor:
        """The token's part of the cell: W e for embeddings (..., embedding). It does not depend on the state."""
        return token if self.config.cell == "none" else self.cell_w(token)

    def next_state(self, state: Tensor, token_input: Tensor) -> Tensor:
        """States (..., state) after one more token, whose part of the cell is `token_input`."""
        if self.config.cell == "none":
            return token_input + state
        if narrow(state):
            new: Tensor = cell(state, self.cell_u.weight, self.cell_u.bias, token_input)
            return new
        mixed = self.cell_u(state) + token_input
        if self.config.cell == "rnn":
            return F.silu(mixed)
        candidate, gate = mixed.chunk(2, dim=-1)
        return torch.lerp(state, F.silu(candidate), torch.sigmoid(gate))

    def first_state(self, token: Tensor, context: Tensor) -> Tensor:
        """The state after the last token, before any guess."""
        if self.config.first_state == "embedding":
            return token
        if self.config.first_state == "zero":
            before = token.new_zeros(*token.shape[:-1], self.config.state_size)
        else:
            before = torch.tanh(self.from_context(context))
        return self.next_state(before, self.token_input(token))

    def share(self, context: Tensor) -> Tensor:
        """The context's part of the input projection (..., exit), the same for every guess of a step.

        Without an input projection it is the context itself.
        """
        if self.input_proj is None:
            return context
        return self.columns(context, self.config.state_size, self.input_proj.bias)

    def columns(self, x: Tensor, start: int, bias: Tensor | None = None) -> Tensor:
        """x times the columns of the input projection from `start` on."""
        assert self.input_proj is not None
        return F.linear(x, self.input_proj.weight[:, start : start + x.shape[-1]], bias)

    def features(self, state: Tensor, share: Tensor, reading: Tensor | None = None) -> Tensor:
        """States, the context's parts and the memory's outputs -> the features that `vocabulary` turns into logits."""
        return self.project(self.trunk(state, share, reading))

    def project(self, x: Tensor) -> Tensor:
        """The output of the blocks, in the width of the vocabulary's rows."""
        return self.head(x) if self.config.head == "tied" else x

    def trunk(self, state: Tensor, share: Tensor, reading: Tensor | None = None) -> Tensor:
        """The output of the blocks."""
        if self.input_proj is None:
            x = torch.cat([state, share.expand(*state.shape[:-1], -1)] + ([] if reading is None else [reading]), dim=-1)
        elif narrow(state) and share.shape[-2] == 1:  # one context for a beam; in training each position has its own
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
        if self.config.normed:  # between unit size and unit length: the vocabulary amplifies each change of x
            x = self._unit(x) * self.config.exit_size**-0.25
        return x

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        """(V', F) the head's own weights, or for a tied head the target's output embedding."""
        return self.head.weight if self.config.head == "own" else output_embedding
