"""The recurrent drafter's network: s = silu(U s + W e + b), g = [s, h], residual blocks, softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.config import RecurrentConfig


class RecurrentNet(nn.Module):
    """Guesses a token from the state s, which has read the tokens since, and the context h.

    h is the target's hidden state that chose the last token; it stays the same for all guesses of
    a step. The embeddings e are the target's own, given from outside.
    """

    token_ids: Tensor | None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        joint = config.state_size + config.context_size
        if config.cell == "rnn":
            self.cell_u = nn.Linear(config.state_size, config.state_size)
            self.cell_w = nn.Linear(config.embedding_size, config.state_size, bias=False)
        if config.first_state == "context":
            self.from_context = nn.Linear(config.context_size, config.state_size)
        self.input_proj = nn.Linear(joint, config.exit_size) if config.exit_size != joint else None
        self.blocks = nn.ModuleList(nn.Linear(config.exit_size, config.exit_size) for _ in range(config.blocks))
        out = config.guessable if config.head == "own" else config.embedding_size
        self.head = nn.Linear(config.exit_size, out, bias=False)
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("token_ids", ids)

    def next_state(self, state: Tensor, embedding: Tensor) -> Tensor:
        """States (..., state) that read one more token (..., embedding)."""
        if self.config.cell == "none":
            return embedding + state
        return F.silu(self.cell_u(state) + self.cell_w(embedding))

    def first_state(self, embedding: Tensor, context: Tensor) -> Tensor:
        """The state that has read the last token only."""
        if self.config.first_state == "embedding":
            return embedding
        if self.config.first_state == "zero":
            before = embedding.new_zeros(*embedding.shape[:-1], self.config.state_size)
        else:
            before = torch.tanh(self.from_context(context))
        return self.next_state(before, embedding)

    def logits(self, state: Tensor, context: Tensor, output_embedding: Tensor | None) -> Tensor:
        """States and contexts of equal leading shape -> logits over the tokens that can be guessed.

        A tied head ends in the rows of the target's output embedding (V', embedding).
        """
        x = torch.cat([state, context], dim=-1)
        if self.input_proj is not None:
            x = self.input_proj(x)
        for block in self.blocks:
            x = x + F.silu(block(x))
        x = self.head(x)
        return x if output_embedding is None else F.linear(x, output_embedding)
