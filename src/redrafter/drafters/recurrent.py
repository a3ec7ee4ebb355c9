"""The papers' drafter: a recurrent network on the target's hidden state."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import checkpoint, int8
from redrafter.drafters.base import output_rows, settled
from redrafter.drafters.int8 import Product
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.kernels.drafter_layers import cell, narrow, trial
from redrafter.nets.recurrent import RecurrentNet
from redrafter.targets import TargetInfo


@dataclass(frozen=True)
class Context:
    """All there is to remember: the hidden state that chose the last token, and the memory, if there is one."""

    context: Tensor  # (B, C)
    memory: Tensor | None = None  # (B, heads, size, size)


class RecurrentDrafter:
    """A `RecurrentNet` bound to a target, whose embeddings it reads."""

    name = "recurrent"

    def __init__(self, net: RecurrentNet, target: TargetInfo) -> None:
        self.net = net = settled(net, target)
        self.embed = target.input_embedding
        self.vocabulary = net.vocabulary(output_rows(net, target))
        self.logits: Product = lambda x: F.linear(self.net.project(x), self.vocabulary)
        self.table: Tensor | None = None
        self.heard: Product = lambda tokens: self.net.heard(self.net.token(self.embed(tokens)))
        if self.vocabulary.is_cuda:
            self._fold()

    @property
    def default_shape(self) -> Shape:
        """A GPU verifies 64 tokens about as fast as one; a CPU pays for each."""
        on_gpu = self.vocabulary.device.type == "cuda"
        return Shape(width=16, length=8, nodes=63) if on_gpu else Shape(width=3, length=3, nodes=5)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.config.layers

    @classmethod
    def load(cls, folder: str | Path, target: TargetInfo) -> "RecurrentDrafter":
        net = checkpoint.read_for(Path(folder), target)
        if not isinstance(net, RecurrentNet):
            raise DrafterMismatch(f"{folder} holds no recurrent drafter: {checkpoint.model_type(net)}")
        return cls(net, target).lean()

    def lean(self) -> "RecurrentDrafter":
        """On a CPU in fp32: products of int8 weights. For networks that we read ourselves."""
        if int8.fits(self.vocabulary):
            int8.lean(self.net)
            product = int8.rounded(self.vocabulary)
            self.logits = lambda x: product(self.net.project(x))
        return self

    @torch.no_grad()
    def _fold(self) -> None:
        """Products of weights alone are made once, where that leaves less to read for each guess."""
        net, config = self.net, self.net.config
        trial(self.vocabulary)
        rows, wide = self.vocabulary.shape
        if config.head == "tied" and rows * config.exit_size < wide * (rows + config.exit_size):
            self.vocabulary = self.vocabulary @ net.head.weight  # (V', exit)
            self.logits = lambda x: F.linear(x, self.vocabulary)
        if config.cell != "none":
            ids = torch.arange(config.vocab_size, device=self.vocabulary.device)
            guessed = ids if net.token_ids is None else net.token_ids
            places = torch.arange(len(guessed), device=ids.device)
            place = self.place = torch.zeros_like(ids).index_copy_(0, guessed, places)
            table = self.table = net.heard(net.token(self.embed(guessed)))  # (V', 1 or 2 states)
            self.heard = lambda tokens: table[place[tokens]]

    def save(self, folder: str | Path, target: TargetInfo, overwrite: bool = False, storage: str = "exact") -> None:
        checkpoint.write(Path(folder), self.net, target, overwrite, storage)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Context:
        memory = None
        if self.net.memory is not None:
            # The last hidden state's pair comes with the token it chooses, through `advance`.
            memory = self.remember(self.net.memory.empty(len(tokens)), tokens[:, 1:], hidden[:, :-1], lengths - 1)
        return Context(self.net.context(_pick(hidden, lengths - 1)), memory)

    def draft(self, state: Context, last: Tensor, search: Search) -> Tree:
        net = self.net
        if search.shape.width > net.config.guessable:
            raise ConfigError(
                f"beam width {search.shape.width} is larger than the drafter's {net.config.guessable} tokens"
            )
        share = net.share(state.context)[:, None]  # (B, 1, exit)

        def advance(states: Tensor | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            if states is None:  # any token may be the last one; from here on only guessed ones come
                states = net.first_state(net.token(self.embed(tokens)), state.context[:, None])
            elif self.table is not None and narrow(states, tokens.numel()):
                unit = net.cell_u
                states = cell(states, unit.weight, unit.bias, self.table, parents, tokens, self.place)
            else:
                before = states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
                states = net.next_state(before, self.heard(tokens))
            reading = None
            if net.memory is not None and state.memory is not None:
                reading = net.memory.read(state.memory, states)
            return self.logits(net.trunk(states, share, reading)), states

        return search.tree(advance, None, last, net.token_ids)

    def advance(self, state: Context, accepted: Accepted, hidden: Tensor) -> Context:
        memory = state.memory
        if memory is not None:
            memory = self.remember(memory, accepted.tokens, hidden, accepted.count)
        return Context(self.net.context(_pick(hidden, (accepted.count - 1).clamp(min=0))), memory)

    def remember(self, memory: Tensor, tokens: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
        """The memory with the first `count` (B,) more pairs: tokens (B, n), the states (B, n, C) that chose them."""
        assert self.net.memory is not None
        pair = torch.cat([self.net.context(hidden), self.net.token(self.embed(tokens))], dim=-1)
        return self.net.memory.add(memory, pair, count)

    def keep(self, state: Context, rows: Tensor) -> Context:
        return keep_rows(state, rows)


def _pick(hidden: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B,) -> (B, C)."""
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
