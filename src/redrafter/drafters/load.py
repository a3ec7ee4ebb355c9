"""From a network, or the folder of its checkpoint, to a drafter bound to a target."""

from pathlib import Path
from typing import Any

from redrafter.drafters import checkpoint, registry
from redrafter.drafters.base import DrafterNet, NetDrafter
from redrafter.targets import TargetInfo

CPU_TOKENS = 8192
"""Tokens that a drafter guesses among on a CPU, where each costs time: the first, which are the most frequent."""


def bind(net: DrafterNet, target: TargetInfo) -> NetDrafter[Any]:
    """The drafter of the network's kind."""
    return registry.get(net.config.kind).drafter(net, target)


def bind_own(net: DrafterNet, target: TargetInfo) -> NetDrafter[Any]:
    """The drafter of a network that nobody else uses: on a CPU it guesses among fewer tokens, with int8 weights."""
    if target.device.type == "cpu":
        net.guess_first(CPU_TOKENS)
    return bind(net, target).use_int8()


def load_drafter(folder: Path, target: TargetInfo) -> NetDrafter[Any]:
    return bind_own(checkpoint.read_for(folder, target), target)
