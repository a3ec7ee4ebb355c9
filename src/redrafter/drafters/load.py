"""From a network, or the folder of its checkpoint, to a drafter bound to a target."""

from pathlib import Path
from typing import Any

from redrafter.drafters import checkpoint, registry
from redrafter.drafters.base import DrafterNet, NetDrafter
from redrafter.targets import Target


def bind(net: DrafterNet, target: Target) -> NetDrafter[Any]:
    """The drafter of the network's kind."""
    return registry.get(net.config.kind).drafter(net, target)


def load_drafter(folder: Path, target: Target) -> NetDrafter[Any]:
    return bind(checkpoint.read_for(folder, target), target).use_int8()
