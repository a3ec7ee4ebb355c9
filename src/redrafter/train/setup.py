"""The start of a training run: checks that need no data, the held-out texts, and the network."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterConfig, DrafterNet, check_shapes
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.interop import published
from redrafter.memory import require_room
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import count_positions
from redrafter.train.config import TrainConfig


def check(
    target: Target,
    options: DrafterOptions,
    config: TrainConfig,
    shape: Shape,
    init_from: Path | None = None,
    rollouts: int = 0,
) -> DrafterConfig:
    """Raise for every mistake that can be found before data is made; return the sizes of the network to train."""
    planned = _read_fitting(target, init_from, options).config if init_from else options.config_for(target)
    if shape.width > planned.guessable:
        raise ConfigError(f"beam width {shape.width} is larger than the drafter's {planned.guessable} tokens")
    if rollouts and config.depth >= rollouts:
        raise ConfigError(
            f"rollouts of {rollouts} tokens teach a depth of {rollouts - 1} at most, not {config.depth}: give --depth"
        )
    planned.check_training(config.depth, rollouts)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in checkpoint.make(planned).parameters())
    require_room(
        f"{weights / 1e6:,.0f} M weights",
        {"training them": 4 * 4 * weights},  # with gradients and AdamW's two moments, in fp32
        target.device,
        "give smaller sizes, such as --state-size, --exit-size or --blocks",
    )
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    with torch.no_grad():
        width = target.states(token, (*planned.layers, -1)).shape[2]
    if width != target.hidden_size * (len(planned.layers) + 1):
        raise UnsupportedTarget(
            f"{target.name} has hidden states of different widths; redrafter drafters need equal widths"
        )
    return planned


def _read(folder: Path, target: Target) -> DrafterNet:
    """The network in a folder of ours, or a published one with the reading of its conventions that guesses best."""
    found = published.read(folder, target)
    if found is None:
        return checkpoint.read_for(folder, target)
    from redrafter.interop import conventions

    measured = conventions.choose(found, target).net.config
    whole = published.read(folder, target)  # the measured one may guess among fewer tokens, with rounded weights
    assert whole is not None
    whole.net.config = replace(measured, draft_vocab_size=whole.net.config.draft_vocab_size)
    return whole.net


def _read_fitting(target: Target, folder: Path, options: DrafterOptions) -> DrafterNet:
    """The network in a folder; with room for more tokens if `options` ask for another number than the usual one."""
    net = _read(folder, target)
    check_shapes(net.config, target)
    if options.draft_vocab != DrafterOptions.draft_vocab:
        asked, known = min(options.draft_vocab or target.vocab_size, target.vocab_size), net.config.guessable
        if asked < known:
            raise ConfigError(
                f"the drafter {folder} guesses among {known} tokens, not fewer, but draft_vocab is {asked}"
            )
        if asked > known:
            net.guess_more(asked)
    return net.float()


def settings(
    target: Target,
    drafter: DrafterConfig,
    config: TrainConfig,
    shape: Shape,
    init_from: Path | None,
    processes: int = 1,
) -> dict[str, Any]:
    """What a run must have in common with the one it continues."""
    return {
        "train": asdict(config),
        "drafter": asdict(drafter),
        "shape": asdict(shape),
        "target": checkpoint.identity(target),
        "init_from": str(init_from),
        "processes": processes,
    }


def split(texts: Texts, held_out: int) -> tuple[Tensor, Tensor]:
    """Held-out rows, spread over the data and greedy if there are greedy ones; and the rows to learn from."""
    useful = (count_positions(texts) > 0).nonzero()[:, 0]
    if len(useful) < 2:
        raise ConfigError(f"the data has {len(useful)} texts with something to guess; training needs at least 2")
    greedy = useful[texts.temperatures[useful] == 0]
    pool = greedy if len(greedy) > 1 else useful
    count = min(held_out, max(1, len(useful) // 10), len(pool))
    held = spread(pool, count)
    mask = torch.ones(len(texts), dtype=torch.bool)
    mask[held] = False
    return held, useful[mask[useful]]


def spread(rows: Tensor, count: int) -> Tensor:
    """So many of them, at equal distances.

    >>> spread(torch.arange(10), 3).tolist()
    [0, 3, 6]
    """
    return rows[torch.arange(count) * len(rows) // count]


def make_net(
    target: Target, texts: Texts, options: DrafterOptions, seed: int, init_from: Path | None = None
) -> DrafterNet:
    """A new network that guesses among the most frequent tokens of the data; or a copy of `init_from`.

    Token ids are in order of frequency, those of `init_from` first.
    """
    known = torch.empty(0, dtype=torch.long)
    if init_from is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = checkpoint.make(options.config_for(target))
    else:
        own = _read(init_from, target).token_ids
        net, known = _read_fitting(target, init_from, options), known if own is None else own
    if net.token_ids is not None and len(net.token_ids) > len(known):
        counts = torch.bincount(texts.tokens.long(), minlength=target.vocab_size)[: target.vocab_size]
        counts[known] = -1
        new = counts.argsort(descending=True, stable=True)[: len(net.token_ids) - len(known)]
        net.token_ids.copy_(torch.cat([known, new]))
    return net
