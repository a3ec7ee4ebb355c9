"""Widen a recurrent drafter for a widened target: the same drafts at the cost of a larger network.

As in `benchmarks/widen/target.py`, added dimensions are exactly zero, and columns that read them hold random numbers.
Where the network normalises by the mean square, the mean includes the added zeros; the weights that read the result are
scaled to compensate.
"""

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn

from benchmarks.widen.target import MatrixPadder
from redrafter.config import require
from redrafter.drafters import RecurrentConfig, RecurrentDrafter, RecurrentNet
from redrafter.drafters.options import HeadKind
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.targets import Target

BUDGETS = {"80M": 80_000_000, "100M": 100_000_000, "120M": 120_000_000, "430M": 430_000_000}
"""Parameters read per draft step. 430M is about the size of the papers' drafter."""
STEP = 128
"""Exit sizes grow by this step; GPUs multiply matrices fastest at multiples of 128."""


def widen_recurrent(
    drafter: RecurrentDrafter, target: Target, budget: str | int = "120M", *, seed: int = 0
) -> RecurrentDrafter:
    """Widen the drafter of a small target for `target`, the widened copy of that small target.

    State and exit size grow in proportion until a draft step reads `budget` parameters; the memory keeps its size. A
    head tied to the target's output embedding becomes an untied head if the tied head exceeds the budget.
    """
    if isinstance(budget, str):
        require(budget in BUDGETS, f"unknown budget {budget!r}; use one of {', '.join(BUDGETS)} or a number")
        budget = BUDGETS[budget]
    check_can_widen(drafter.net.config, target)
    config = fitting(drafter.net.config, target, budget)
    with torch.device("meta"):
        net = RecurrentNet(config)
    net = net.to(target.dtype).to_empty(device=target.device).requires_grad_(False).eval()
    with torch.no_grad():
        _RecurrentLayout(drafter.net, net, MatrixPadder(target.device, seed)).fill(target)
    return RecurrentDrafter(net, target)


def parameters_per_draft_step(drafter: RecurrentDrafter) -> int:
    """Count the parameters that each depth of the beam reads, including the vocabulary.

    Parameters used once per step, for the context, are not counted.
    """
    return read_per_draft_step(drafter.net)


def read_per_draft_step(net: RecurrentNet) -> int:
    """Count the same for a network without a target."""
    config = net.config
    read = sum(p.numel() for p in net.parameters())
    if config.first_state == "context":
        read -= net.from_context.weight.numel() + net.from_context.bias.numel()
    if net.memory is not None:
        read -= net.memory.key.weight.numel() + net.memory.value.weight.numel() + net.memory.decay.numel()
    if net.input_proj is not None:
        read -= config.exit_size * (config.context_size + 1)  # the context's columns and the bias
    return read + (config.guessable * config.embedding_size if config.head == "tied" else 0)


def check_can_widen(config: RecurrentConfig, target: Target) -> None:
    """Raise unless the target was widened from the drafter's target, and the drafter can be widened by its weights."""
    origin = getattr(target.config, "widened_from", None)
    if origin is None:
        raise DrafterMismatch(f"{target.name} is no widened target; make one with benchmarks.widen.widen")
    hidden = origin["hidden_size"]
    if config.embedding_size != hidden or config.context_size != hidden * len(config.layers):
        own = config.embedding_size
        raise DrafterMismatch(
            f"{target.name} was widened from a hidden size of {hidden}, the drafter reads one of {own}"
        )
    if config.normed and _raw_state(config):
        raise DrafterMismatch(
            "a drafter whose states are normalised embeddings cannot be widened: no weight scales the embeddings"
        )


def fitting(small: RecurrentConfig, target: Target, budget: int) -> RecurrentConfig:
    """Return the largest configuration within the budget, with a tied head if that fits."""
    heads: tuple[HeadKind, ...] = ("tied", "own") if small.head == "tied" else ("own",)
    for head in heads:
        fits = None
        for exit_size in count(small.exit_size, STEP):
            config = grown(small, target, exit_size, head)
            with torch.device("meta"):
                read = read_per_draft_step(RecurrentNet(config))
            if read > budget:
                break
            if config.exit_size != config.joint_size:  # the widened network always has an input projection
                fits = config
        if fits is not None:
            return fits
    raise ConfigError(f"a draft step for {target.name} reads at least {read:,} parameters, the budget is {budget:,}")


def grown(small: RecurrentConfig, target: Target, exit_size: int, head: HeadKind) -> RecurrentConfig:
    """Return a configuration for the wide target; state and exit size keep their proportion."""
    hidden, real_layers = target.hidden_size, target.config.widened_from["num_hidden_layers"]
    layers = [layer % (real_layers + 1) for layer in small.layers]
    return replace(
        small,
        context_size=hidden * len(layers),
        embedding_size=hidden,
        state_size=hidden if _raw_state(small) else small.state_size * exit_size // small.exit_size,
        exit_size=exit_size,
        head=head,
        # Added layers come last, so only the index of the hidden state after the final norm changes.
        layers=tuple(-1 if layer == real_layers else layer for layer in layers),
    )


def _raw_state(config: RecurrentConfig) -> bool:
    """Whether embeddings are used as recurrent states without a projection."""
    return config.first_state == "embedding" or config.cell == "none"


class _RecurrentLayout:
    """Where each weight of a small recurrent network goes in the wide network, and how it is scaled."""

    def __init__(self, small: RecurrentNet, wide: RecurrentNet, padder: MatrixPadder) -> None:
        self.small, self.wide, self.pad = small, wide, padder.pad
        own, new = small.config, wide.config
        self.state, self.exit = torch.arange(own.state_size), torch.arange(own.exit_size)
        self.embedding = torch.arange(own.embedding_size)
        self.context = torch.cat([self.embedding + i * new.embedding_size for i in range(len(own.layers))])
        # Adding zeros to x scales x / rms(x) by sqrt(new size / old size); the exit is also divided by size^(1/4).
        self.input_scale = (own.embedding_size / new.embedding_size) ** 0.5 if own.normed else 1.0
        self.block_scale = (own.exit_size / new.exit_size) ** 0.5 if own.normed else 1.0
        self.head_scale = (own.exit_size / new.exit_size) ** 0.25 if own.normed else 1.0

    def fill(self, target: Target) -> None:
        if self.wide.token_ids is not None and self.small.token_ids is not None:
            self.wide.token_ids.copy_(self.small.token_ids)
        self.cell()
        self.memory()
        self.input_projection()
        exits = torch.arange(self.wide.config.exit_size)
        for new, own in zip(self.wide.blocks, self.small.blocks, strict=True):
            assert isinstance(new, nn.Linear)
            assert isinstance(own, nn.Linear)
            self.pad(new.weight, own.weight * self.block_scale, self.exit, self.exit, exits)
            pad_bias(new.bias, own.bias, self.exit)
        self.head(target)

    def cell(self) -> None:
        own, new, rows = self.small, self.wide, self.state
        states = torch.arange(new.config.state_size)
        if new.config.first_state == "context":
            weight = own.from_context.weight * self.input_scale
            self.pad(new.from_context.weight, weight, self.state, self.context, states)
            pad_bias(new.from_context.bias, own.from_context.bias, self.state)
        if new.config.cell == "none":
            return
        if new.config.cell == "gated":  # gate rows follow; a gate between two zeros may have any value
            rows = torch.cat([self.state, self.state + len(states)])
        self.pad(new.cell_u.weight, own.cell_u.weight, rows, self.state, states)
        pad_bias(new.cell_u.bias, own.cell_u.bias, rows)
        self.pad(new.cell_w.weight, own.cell_w.weight * self.input_scale, rows, self.embedding, states)

    def memory(self) -> None:
        """Copy the memory at its own size: its normalisation has a constant that no weight could compensate."""
        own, new = self.small.memory, self.wide.memory
        if own is None or new is None:
            return
        rows = torch.arange(own.out_size)
        pair = torch.cat([self.context, self.embedding + self.wide.config.context_size])
        self.pad(new.key.weight, own.key.weight * self.input_scale, rows, pair)
        self.pad(new.value.weight, own.value.weight * self.input_scale, rows, pair)
        self.pad(new.query.weight, own.query.weight, rows, self.state)
        new.decay.copy_(own.decay)

    def input_projection(self) -> None:
        own, new = self.small.config, self.wide.config
        projection = self.small.input_proj
        assert self.wide.input_proj is not None
        # A network without an input projection gets the identity.
        weight = torch.eye(own.exit_size) if projection is None else projection.weight.clone()
        weight[:, own.state_size : own.state_size + own.context_size] *= self.input_scale
        reading = torch.arange(own.memory_heads * own.memory_size) + new.state_size + new.context_size
        columns = torch.cat([self.state, self.context + new.state_size, reading])
        self.pad(self.wide.input_proj.weight, weight, self.exit, columns, torch.arange(new.exit_size))
        pad_bias(self.wide.input_proj.bias, None if projection is None else projection.bias, self.exit)

    def head(self, target: Target) -> None:
        own, new = self.small, self.wide
        weight = own.head.weight * self.head_scale
        rows, zero_rows = self.embedding, torch.arange(new.config.embedding_size)
        if new.config.head == "own":
            rows, zero_rows = torch.arange(new.config.guessable), torch.arange(0)
        if own.config.head != new.config.head:  # untie the head: multiply it by the vocabulary
            vocabulary = target.output_embedding.weight[:, : own.config.embedding_size]
            if new.token_ids is not None:
                vocabulary = vocabulary[new.token_ids]
            weight = vocabulary.to(weight) @ weight
        self.pad(new.head.weight, weight, rows, self.exit, zero_rows)


def pad_bias(wide: Tensor, small: Tensor | None, rows: Tensor) -> None:
    """Write a bias into a larger bias; the rest is zero."""
    wide.zero_()
    if small is not None:
        wide[rows.to(wide.device)] = small.to(wide)
