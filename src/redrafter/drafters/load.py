"""From a network of ours, or the folder it lies in, to a drafter bound to its target."""

from pathlib import Path

from redrafter.drafters import checkpoint
from redrafter.drafters.checkpoint import Net
from redrafter.drafters.eagle import EagleDrafter
from redrafter.drafters.medusa import MedusaDrafter
from redrafter.drafters.recurrent import RecurrentDrafter
from redrafter.nets.eagle import EagleNet
from redrafter.nets.medusa import MedusaNet
from redrafter.targets import Target

NetDrafter = RecurrentDrafter | MedusaDrafter | EagleDrafter


def bind(net: Net, target: Target) -> NetDrafter:
    """The drafter that uses this kind of network."""
    if isinstance(net, MedusaNet):
        return MedusaDrafter(net, target)
    if isinstance(net, EagleNet):
        return EagleDrafter(net, target)
    return RecurrentDrafter(net, target)


def load_drafter(folder: Path, target: Target) -> NetDrafter:
    return bind(checkpoint.read_for(folder, target), target).lean()
