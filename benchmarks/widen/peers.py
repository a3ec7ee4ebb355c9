"""Widen Medusa and EAGLE drafters for a widened target: the same drafts at the cost of larger networks.

As in `benchmarks/widen/target.py`, added dimensions are exactly zero.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.widen.drafter import BUDGETS, STEP, pad_bias
from benchmarks.widen.target import MatrixPadder
from redrafter.drafters import EagleConfig, EagleDrafter, EagleNet, MedusaConfig, MedusaDrafter, MedusaNet
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.targets import Target

N = TypeVar("N", MedusaNet, EagleNet)


@torch.no_grad()
def widen_medusa(
    drafter: MedusaDrafter, target: Target, budget: int = BUDGETS["120M"], *, seed: int = 0
) -> MedusaDrafter:
    """Widen Medusa until a step reads `budget` parameters. Medusa drafts all depths in one draft step."""
    small, hidden = drafter.net.config, real_dimensions(drafter.net.config, target)
    wide = target.hidden_size
    fits, config = None, replace(small, context_size=wide * len(small.layers), embedding_size=wide)
    while read_by_medusa(config) <= budget:
        fits, config = config, replace(config, exit_size=config.exit_size + STEP)
    if fits is None:
        raise ConfigError(f"Medusa for {target.name} reads at least {read_by_medusa(config):,} parameters: too many")
    net = empty_network(MedusaNet, fits, target)
    pad = MatrixPadder(target.device, seed).pad
    context = torch.cat([hidden + i * wide for i in range(len(small.layers))])
    exits, every = torch.arange(small.exit_size), torch.arange(fits.exit_size)
    # Adding zeros to x scales x / rms(x) by sqrt(new size / old size); the last one is also divided by size^(1/4).
    inner, outer = (small.exit_size / fits.exit_size) ** 0.5, (len(hidden) / wide) ** 0.5
    pairs: list[tuple[Any, Any]] = list(zip(net.heads, drafter.net.heads, strict=True))
    for new, own in pairs:
        pad(new.into.weight, own.into.weight * outer, exits, context, every)
        pad_bias(new.into.bias, own.into.bias, exits)
        for block, small_block in zip(new.blocks, own.blocks, strict=True):
            pad(block.weight, small_block.weight * inner, exits, exits, every)
            pad_bias(block.bias, small_block.bias, exits)
        pad(new.out.weight, own.out.weight * inner**0.5, hidden, exits, torch.arange(wide))
    return MedusaDrafter(copy_buffers(drafter.net, net), target)


@torch.no_grad()
def widen_eagle(drafter: EagleDrafter, target: Target, *, seed: int = 0) -> EagleDrafter:
    """Widen EAGLE to one layer of the wide target, as published: its width, attention and MLP sizes."""
    small, hidden = drafter.net.config, real_dimensions(drafter.net.config, target)
    wide = target.hidden_size
    config = replace(
        small,
        context_size=wide,
        embedding_size=wide,
        heads=max(small.heads, wide // small.head_size),
        exit_size=max(small.exit_size, target.config.intermediate_size),
    )
    net, own = empty_network(EagleNet, config, target), drafter.net
    pad = MatrixPadder(target.device, seed).pad
    scale = (len(hidden) / wide) ** 0.5
    every, zero_units = torch.arange(wide), torch.arange(config.exit_size)
    heads, units = torch.arange(small.heads * small.head_size), torch.arange(small.exit_size)
    all_heads = torch.arange(config.heads * config.head_size)
    assert net.fuse is not None
    assert own.fuse is not None
    pad(net.fuse.weight, own.fuse.weight * scale, hidden, torch.cat([hidden, hidden + wide]), every)
    pad_bias(net.fuse.bias, own.fuse.bias, hidden)
    blocks: list[Any] = [net.blocks[0], own.blocks[0]]
    layer, small_layer = blocks
    pad(layer.query.weight, small_layer.query.weight * scale, heads, hidden)
    pad(layer.key.weight, small_layer.key.weight * scale, heads, hidden)
    pad(layer.value.weight, small_layer.value.weight * scale, heads, hidden, all_heads)  # added heads have zero values
    pad(layer.out.weight, small_layer.out.weight, hidden, heads, every)
    pad(layer.gate.weight, small_layer.gate.weight * scale, units, hidden)
    pad(layer.up.weight, small_layer.up.weight * scale, units, hidden, zero_units)
    pad(layer.down.weight, small_layer.down.weight, hidden, units, every)
    return EagleDrafter(copy_buffers(own, net), target)


def read_by_medusa(config: MedusaConfig) -> int:
    """Count the parameters that a step reads, including the vocabulary."""
    wide = config.exit_size
    head = (config.context_size + 1) * wide + config.blocks * (wide + 1) * wide + wide * config.embedding_size
    return config.heads * head + config.guessable * config.embedding_size


def parameters_read(drafter: MedusaDrafter | EagleDrafter) -> int:
    """Count the parameters of a draft step (EAGLE: one depth; Medusa: all depths), including the vocabulary."""
    return sum(p.numel() for p in drafter.net.parameters()) + drafter.vocabulary.numel()


def real_dimensions(config: MedusaConfig | EagleConfig, target: Target) -> Tensor:
    """Return the dimensions of the wide hidden states that come from the small target."""
    origin = getattr(target.config, "widened_from", None)
    if origin is None:
        raise DrafterMismatch(f"{target.name} is no widened target; make one with benchmarks.widen.widen")
    if config.embedding_size != origin["hidden_size"]:
        raise DrafterMismatch(
            f"{target.name} was widened from a hidden size of {origin['hidden_size']}, the drafter reads one of "
            f"{config.embedding_size}"
        )
    if any(layer != -1 for layer in config.layers):
        raise DrafterMismatch(f"only a peer that reads the last hidden state can be widened, not {config.layers}")
    return torch.arange(config.embedding_size)


def empty_network(kind: type[N], config: Any, target: Target) -> N:
    with torch.device("meta"):
        net = kind(config)
    return net.to(target.dtype).to_empty(device=target.device).requires_grad_(False).eval()


def copy_buffers(own: N, new: N) -> N:
    for name, value in own.named_buffers():
        new.get_buffer(name).copy_(value)
    return new
