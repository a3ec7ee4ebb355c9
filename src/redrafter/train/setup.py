"""What training begins with: checks that need no data, texts kept out of it, and a network."""

from pathlib import Path

import torch
from torch import Tensor

from redrafter.config import DrafterConfig, EagleConfig, MedusaConfig, Shape
from redrafter.drafters import checkpoint
from redrafter.drafters.base import check_shapes
from redrafter.drafters.checkpoint import Net
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import count_positions
from redrafter.train.config import DrafterOptions, TrainConfig


def check(
    target: Target,
    options: DrafterOptions,
    config: TrainConfig,
    shape: Shape,
    init_from: Path | None = None,
    rollouts: int = 0,
) -> DrafterConfig:
    """Whatever can be seen to be wrong before data is made; the drafter's shape if nothing is."""
    planned = _read_fitting(target, init_from).config if init_from else options.shape(target)
    if shape.width > planned.guessable:
        raise ConfigError(f"beam width {shape.width} is larger than the drafter's {planned.guessable} tokens")
    if rollouts and config.depth >= rollouts:
        raise ConfigError(
            f"rollouts of {rollouts} tokens teach a depth of {rollouts - 1} at most, not {config.depth}: give --depth"
        )
    if isinstance(planned, MedusaConfig) and planned.heads != config.depth:
        raise ConfigError(
            f"a Medusa drafter has one network for each depth: {planned.heads} cannot learn a depth of {config.depth}; "
            "give --heads and --depth alike"
        )
    if isinstance(planned, EagleConfig) and rollouts:
        raise ConfigError("an EAGLE drafter learns from whole texts, not from rollouts: give data made without --local")
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    with torch.no_grad():
        width = target.states(token, (*planned.layers, -1)).shape[2]
    if width != target.hidden_size * (len(planned.layers) + 1):
        raise UnsupportedTarget(f"{target.name} has hidden states of different widths: no drafter of ours reads those")
    return planned


def _read_fitting(target: Target, folder: Path) -> Net:
    net = checkpoint.read_for(folder, target)
    check_shapes(net.config, target)
    return net.float()


def split(texts: Texts, held_out: int) -> tuple[Tensor, Tensor]:
    """Rows to simulate on, spread over the data and greedy ones if there are any; and rows to learn from."""
    useful = (count_positions(texts) > 0).nonzero()[:, 0]
    if len(useful) < 2:
        raise ConfigError(f"the data has {len(useful)} texts with something to guess; training needs at least 2")
    greedy = useful[texts.temperatures[useful] == 0]
    pool = greedy if len(greedy) > 1 else useful
    count = min(held_out, max(1, len(useful) // 10), len(pool))
    held = pool[torch.arange(count) * len(pool) // count]
    mask = torch.ones(len(texts), dtype=torch.bool)
    mask[held] = False
    return held, useful[mask[useful]]


def make_net(target: Target, texts: Texts, options: DrafterOptions, seed: int, init_from: Path | None = None) -> Net:
    """A fresh network for the target, guessing among the data's most frequent tokens; or a copy of another."""
    if init_from is not None:
        return _read_fitting(target, init_from)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = checkpoint.make(options.shape(target))
    if net.token_ids is not None:
        counts = torch.bincount(texts.tokens.long(), minlength=target.vocab_size)[: target.vocab_size]
        frequent = counts.argsort(descending=True, stable=True)[: len(net.token_ids)]
        net.token_ids.copy_(frequent.sort().values)
    return net
