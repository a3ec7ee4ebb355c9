"""The drafter kinds that have a network. Checkpoints, training and the command line look a kind up here by its name.

A new kind is one folder under `drafters/` and one line in `MODULES`. A kind outside this package calls `register`
instead. A kind is imported when it is first used, so that reading the names does not import torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from redrafter.bounds import shown
from redrafter.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from redrafter.drafters.base import DrafterConfig, DrafterNet, NetDrafter
    from redrafter.drafters.training import LossInput, TrainingBatch
    from redrafter.targets import Target

MODULES = {
    "recurrent": "redrafter.drafters.recurrent:KIND",
    "medusa": "redrafter.drafters.medusa:KIND",
    "eagle": "redrafter.drafters.eagle:KIND",
    "eagle3": "redrafter.drafters.eagle:EAGLE3",
    "block": "redrafter.drafters.block:KIND",
}
"""Name of a kind -> where the `DrafterKind` is that describes it."""


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """The parts of one kind of drafter."""

    config: "type[DrafterConfig]"
    """Sizes of the network. Its `kind` attribute is the name of the kind."""
    network: "Callable[[Any], DrafterNet]"
    """config -> network with untrained weights."""
    drafter: "Callable[[Any, Any], NetDrafter[Any]]"
    """(network, target) -> drafter."""
    features: "Callable[[Any, LossInput], tuple[Tensor, Tensor | None]]"
    """The forward pass in training: (network, input) -> features (T, n, F) and an additional loss or None.

    Training multiplies the features by `network.training_vocabulary` and applies the loss the user chose to these
    logits.
    """
    calibrate: "Callable[[Any, Target, Iterable[TrainingBatch]], None] | None" = None
    """Runs before each evaluation, on training batches: sets what the network stores but no gradient trains."""

    @property
    def name(self) -> str:
        return self.config.kind


_loaded: dict[str, DrafterKind] = {}


def names() -> tuple[str, ...]:
    """All registered kinds.

    >>> names()[:3]
    ('recurrent', 'medusa', 'eagle')
    """
    return (*MODULES, *(name for name in _loaded if name not in MODULES))


def get(name: str) -> DrafterKind:
    if name not in names():
        raise ConfigError(f"drafter must be one of {', '.join(names())}, got {shown(name)}")
    if name not in _loaded:
        module, _, attribute = MODULES[name].partition(":")
        _loaded[name] = getattr(import_module(module), attribute)
    return _loaded[name]


def register(kind: DrafterKind) -> None:
    """Add a kind from outside this package. Its name must be free."""
    if kind.name in names() and _loaded.get(kind.name) != kind:
        raise ConfigError(f"a drafter kind named {kind.name!r} exists already; choose another name")
    _loaded[kind.name] = kind
