"""The recurrent drafter at work: beam search over a recurrent network, from the target's last hidden state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.beam import Beam, Grow
from redrafter.core.chain import Chain
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import checkpoint
from redrafter.drafters.base import NetDrafter, last_accepted, select_position
from redrafter.drafters.int8 import product, usable_for
from redrafter.drafters.recurrent.compiled import compile_network
from redrafter.drafters.recurrent.int8 import replace_layers
from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.kernels.cpu.draft import DraftModel
from redrafter.kernels.drafter_layers import cell, head, narrow, rounded, trial
from redrafter.targets import TargetInfo

ALIGNED = 16
"""The kernel for an int8 vocabulary reads rows of a multiple of this many bytes."""
TOGETHER = 8192
"""Rows of a vocabulary that are rounded at once: rounding makes several copies in fp32."""


@dataclass(frozen=True)
class RecurrentState:
    """What the drafter keeps of the text."""

    context: Tensor  # (B, C) the hidden state that chose the last token
    memory: Tensor | None = None  # (B, heads, size, size)


class RecurrentDrafter(NetDrafter[RecurrentNet]):
    """A `RecurrentNet` bound to a target."""

    def __init__(self, net: RecurrentNet, target: TargetInfo) -> None:
        super().__init__(net, target)
        self.target = target
        self.compiled: DraftModel | None = None  # runs a whole beam search on a CPU
        self.would_compile = False  # set where a drafter is described without its target's packed weights
        self.logits = lambda x: F.linear(self.net.project(x), self.vocabulary)
        self.table: Tensor | None = None
        self.token_input: Callable[[Tensor], Tensor] = lambda tokens: self.net.token_input(
            self.net.token(self.embed(tokens))
        )
        if self.vocabulary.is_cuda:
            self._precompute()

    @property
    def default_shape(self) -> Shape:
        """Over packed weights a verified token costs a sixth of a pass, and a token of the draft nearly as much.

        So one path is followed, as long as it is likely to be right.
        """
        packed = self.compiled is not None or self.would_compile
        return Shape(width=1, length=4, until=0.5) if packed else super().default_shape

    @property
    def default_length(self) -> int:
        return 8

    @classmethod
    def load(cls, folder: str | Path, target: TargetInfo) -> Self:
        net = checkpoint.read_for(Path(folder), target)
        if not isinstance(net, RecurrentNet):
            raise DrafterMismatch(f"{folder} holds no recurrent drafter: {checkpoint.model_type(net)}")
        return cls(net, target).use_int8()

    def use_int8(self) -> Self:
        if usable_for(self.vocabulary):
            replace_layers(self.net)
            vocabulary_product = product(self.vocabulary)
            self.logits = lambda x: vocabulary_product(self.net.project(x))
            self.compiled = compile_network(self.net, self.target, self.vocabulary)
        return self

    @torch.no_grad()
    def _precompute(self) -> None:
        """Multiply constant weights with each other once, where that leaves fewer bytes to read for each guess."""
        net, config = self.net, self.net.config
        trial(self.vocabulary)
        rows, wide = self.vocabulary.shape
        if config.head == "tied" and rows * config.exit_size < wide * (rows + config.exit_size):
            self.vocabulary = self.vocabulary @ net.head.weight  # (V', exit)
            self.logits = self._rounded(lambda x: x)
        else:
            self.logits = self._rounded(net.project)
        if config.cell != "none":
            ids = torch.arange(config.vocab_size, device=self.vocabulary.device)
            self._make_table(ids if net.token_ids is None else net.token_ids)

    def _rounded(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The product with the vocabulary. For few rows its time is that of reading the vocabulary: in int8, half."""
        parts = [rounded(rows) for rows in torch.split(self.vocabulary, TOGETHER)]
        weight, scale = (torch.cat(x) for x in zip(*parts, strict=True))

        def logits(x: Tensor) -> Tensor:
            x = project(x)
            if not narrow(x) or x.shape[-1] % ALIGNED:
                return F.linear(x, self.vocabulary)
            made: Tensor = head(*rounded(x), weight, scale, x.dtype)
            return made

        return logits

    def _make_table(self, tokens: Tensor) -> None:
        """The cell's input for each of these tokens (n,), computed once."""
        every = torch.zeros(self.net.config.vocab_size, dtype=torch.long, device=tokens.device)
        place = self.place = every.index_copy_(0, tokens, torch.arange(len(tokens), device=tokens.device))
        table = self.table = self.net.token_input(self.net.token(self.embed(tokens)))  # (n, 1 or 2 states)
        self.token_input = lambda tokens: table[place[tokens]]

    @torch.no_grad()
    def read_every_token(self) -> None:
        """Continue after tokens that the drafter itself never guesses: a chain of copied tokens may hold them."""
        if self.table is not None and len(self.table) < self.net.config.vocab_size:
            self._make_table(torch.arange(self.net.config.vocab_size, device=self.table.device))

    def save(self, folder: str | Path, target: TargetInfo, overwrite: bool = False, storage: str = "exact") -> None:
        checkpoint.write(Path(folder), self.net, target, overwrite, storage)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> RecurrentState:
        memory = None
        if self.net.memory is not None:
            # The pair of the last hidden state needs the token it chose: `advance` adds it.
            memory = self.remember(self.net.memory.empty(len(tokens)), tokens[:, 1:], hidden[:, :-1], lengths - 1)
        return RecurrentState(self.net.context(select_position(hidden, lengths - 1)), memory)

    def draft(self, state: RecurrentState, last: Tensor, search: Search) -> Tree:
        net = self.net
        if search.shape.width > net.config.guessable:
            raise ConfigError(
                f"beam width {search.shape.width} is larger than the drafter's {net.config.guessable} tokens"
            )
        # (B, 1, exit). The C++ search computes it itself.
        share = net.share(state.context)[:, None] if self.compiled is None else None

        def advance(states: Tensor | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            if states is None:  # the last token may be one that this drafter never guesses, and not in the table
                states = net.first_state(net.token(self.embed(tokens)), state.context[:, None])
            elif self.table is not None and narrow(states, tokens.numel()):
                unit = net.cell_u
                states = cell(states, unit.weight, unit.bias, self.table, parents, tokens, self.place)
            else:
                before = states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
                states = net.next_state(before, self.token_input(tokens))
            reading = None
            if net.memory is not None and state.memory is not None:
                reading = net.memory.read(state.memory, states)
            own = net.share(state.context)[:, None] if share is None else share
            return self.logits(net.trunk(states, own, reading)), states

        if self.compiled is None:
            return search.tree(advance, None, last, net.token_ids)
        return search.tree(advance, None, last, net.token_ids, self._grow(self.compiled, state, last))

    def _grow(self, compiled: DraftModel, state: RecurrentState, last: Tensor) -> Grow:
        """The whole beam search as one C++ call."""

        def grow(shape: Shape, temperature: Tensor, noise: Tensor | None, chain: Chain | None) -> Beam:
            found = compiled.search(
                state.context, state.memory, last, width=shape.width, length=shape.length, until=shape.until,
                temperature=temperature, noise=noise, chain=None if chain is None else (chain.tokens, chain.odds),
            )  # fmt: skip
            return Beam(*found)

        return grow

    def advance(self, state: RecurrentState, accepted: Accepted, hidden: Tensor) -> RecurrentState:
        if self.compiled is not None:
            self.compiled.take(hidden, accepted.tokens, accepted.count, state.context, state.memory)
            return state
        memory = state.memory
        if memory is not None:
            memory = self.remember(memory, accepted.tokens, hidden, accepted.count)
        return RecurrentState(self.net.context(last_accepted(hidden, accepted)), memory)

    def remember(self, memory: Tensor, tokens: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
        """Add the first `count` (B,) pairs to the memory: tokens (B, n) and the states (B, n, C) that chose them.

        The compiled network overwrites the memory that it is given.
        """
        assert self.net.memory is not None
        if self.compiled is not None:
            if tokens.shape[1]:  # none after a prompt of one token
                self.compiled.take(hidden, tokens, count, hidden.new_empty(len(tokens), hidden.shape[2]), memory)
            return memory
        pair = torch.cat([self.net.context(hidden), self.net.token(self.embed(tokens))], dim=-1)
        return self.net.memory.add(memory, pair, count)
