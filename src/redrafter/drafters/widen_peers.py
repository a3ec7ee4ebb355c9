"""Twins of Medusa's and EAGLE's networks for a widened target: the same guesses at the cost of larger networks.

The rule is that of `widen.py`: what the small network does not have is exactly zero wherever it could be seen.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from redrafter.drafters.eagle import EagleConfig, EagleDrafter, EagleNet
from redrafter.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaNet
from redrafter.drafters.widen import BUDGETS, STEP, pad
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.targets import Target
from redrafter.targets.widen import Filler

Peer = MedusaDrafter | EagleDrafter
N = TypeVar("N", MedusaNet, EagleNet)


@torch.no_grad()
def widen_medusa(
    drafter: MedusaDrafter, target: Target, budget: int = BUDGETS["120M"], *, seed: int = 0
) -> MedusaDrafter:
    """As wide as `budget` lets a step read parameters; all depths are read at once, so a step has one draft step."""
    small, hidden = drafter.net.config, real_dimensions(drafter.net.config, target)
    wide = target.hidden_size
    fits, config = None, replace(small, context_size=wide * len(small.layers), embedding_size=wide)
    while read_by_medusa(config) <= budget:
        fits, config = config, replace(config, exit_size=config.exit_size + STEP)
    if fits is None:
        raise ConfigError(f"Medusa for {target.name} reads at least {read_by_medusa(config):,} parameters: too many")
    net = empty(MedusaNet, fits, target)
    place = Filler(target.device, seed).place
    context = torch.cat([hidden + i * wide for i in range(len(small.layers))])
    exits, every = torch.arange(small.exit_size), torch.arange(fits.exit_size)
    # Zeros added to x make x / rms(x) larger by the root of the growth; the last one is also divided by size^(1/4).
    inner, outer = (small.exit_size / fits.exit_size) ** 0.5, (len(hidden) / wide) ** 0.5
    pairs: list[tuple[Any, Any]] = list(zip(net.heads, drafter.net.heads, strict=True))
    for new, own in pairs:
        place(new.into.weight, own.into.weight * outer, exits, context, every)
        pad(new.into.bias, own.into.bias, exits)
        for block, small_block in zip(new.blocks, own.blocks, strict=True):
            place(block.weight, small_block.weight * inner, exits, exits, every)
            pad(block.bias, small_block.bias, exits)
        place(new.out.weight, own.out.weight * inner**0.5, hidden, exits, torch.arange(wide))
    return MedusaDrafter(copy_buffers(drafter.net, net), target)


@torch.no_grad()
def widen_eagle(drafter: EagleDrafter, target: Target, *, seed: int = 0) -> EagleDrafter:
    """As one layer of the wide target, as published: its width, its attention, its MLP (the small one's if larger)."""
    small, hidden = drafter.net.config, real_dimensions(drafter.net.config, target)
    wide = target.hidden_size
    config = replace(
        small,
        context_size=wide,
        embedding_size=wide,
        heads=max(small.heads, wide // small.head_size),
        exit_size=max(small.exit_size, target.config.intermediate_size),
    )
    net, own = empty(EagleNet, config, target), drafter.net
    place = Filler(target.device, seed).place
    scale = (len(hidden) / wide) ** 0.5
    every, silent_units = torch.arange(wide), torch.arange(config.exit_size)
    heads, units = torch.arange(small.heads * small.head_size), torch.arange(small.exit_size)
    all_heads = torch.arange(config.heads * config.head_size)
    place(net.fuse.weight, own.fuse.weight * scale, hidden, torch.cat([hidden, hidden + wide]), every)
    pad(net.fuse.bias, own.fuse.bias, hidden)
    place(net.query.weight, own.query.weight * scale, heads, hidden)
    place(net.key.weight, own.key.weight * scale, heads, hidden)
    place(net.value.weight, own.value.weight * scale, heads, hidden, all_heads)  # added heads find nothing
    place(net.out.weight, own.out.weight, hidden, heads, every)
    place(net.gate.weight, own.gate.weight * scale, units, hidden)
    place(net.up.weight, own.up.weight * scale, units, hidden, silent_units)
    place(net.down.weight, own.down.weight, hidden, units, every)
    return EagleDrafter(copy_buffers(own, net), target)


def read_by_medusa(config: MedusaConfig) -> int:
    """Parameters that a step reads, the vocabulary among them."""
    wide = config.exit_size
    head = (config.context_size + 1) * wide + config.blocks * (wide + 1) * wide + wide * config.embedding_size
    return config.heads * head + config.guessable * config.embedding_size


def parameters_read(drafter: Peer) -> int:
    """By a draft step: each depth for EAGLE, all depths at once for Medusa; the vocabulary included."""
    return sum(p.numel() for p in drafter.net.parameters()) + drafter.vocabulary.numel()


def real_dimensions(config: MedusaConfig | EagleConfig, target: Target) -> Tensor:
    """Which dimensions of the wide hidden states are the small target's."""
    origin = getattr(target.config, "widened_from", None)
    if origin is None:
        raise DrafterMismatch(f"{target.name} is no widened target; make one with redrafter.targets.widen")
    if config.embedding_size != origin["hidden_size"]:
        raise DrafterMismatch(
            f"{target.name} was widened from a hidden size of {origin['hidden_size']}, the drafter reads one of "
            f"{config.embedding_size}"
        )
    if any(layer != -1 for layer in config.layers):
        raise DrafterMismatch(f"only a peer that reads the last hidden state can be widened, not {config.layers}")
    return torch.arange(config.embedding_size)


def empty(kind: type[N], config: Any, target: Target) -> N:
    with torch.device("meta"):
        net = kind(config)
    return net.to(target.dtype).to_empty(device=target.device).requires_grad_(False).eval()


def copy_buffers(own: N, new: N) -> N:
    for name, value in own.named_buffers():
        new.get_buffer(name).copy_(value)
    return new
