"""The drafters that have a name. Training, `drafter=`, checkpoints, help texts, `bench`, `doctor` and docs ask here.

A new drafter is one entry of `ENTRIES`. Another package registers one by an entry point of the group `GROUP`, and a
program by `register`. The code of a drafter is imported when it is first used, so that reading the names imports no
torch and nothing of other packages.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from redrafter.bounds import shown
from redrafter.errors import ConfigError, RedrafterError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from torch import Tensor

    from redrafter.drafters.base import DrafterConfig, DrafterNet, NetDrafter
    from redrafter.drafters.training import LossInput, TrainingBatch
    from redrafter.targets import Target

    Make = Callable[[Target], Any]

GROUP = "redrafter.drafters"
"""Entry points of packages: a `DrafterKind`, or a function or class that makes a drafter of a target."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of a drafter before its code is imported. Places in the code are written `package.module:NAME`."""

    about: str
    """What guesses."""
    kind: str | None = None
    """Where its `DrafterKind` is, if `redrafter train` trains it."""
    make: str | None = None
    """Where the function is that makes it of a target, if `drafter=` takes its name."""


ENTRIES = {
    "recurrent": Entry(
        about="a recurrent network on the target's hidden states",
        kind="redrafter.drafters.recurrent:KIND",
        make="redrafter.drafters.shipped:load",
    ),
    "medusa": Entry(about="a network for each depth; all guess at once", kind="redrafter.drafters.medusa:KIND"),
    "eagle": Entry(about="a layer that guesses the target's next hidden state", kind="redrafter.drafters.eagle:KIND"),
    "eagle3": Entry(about="EAGLE-3, a layer that reads its own guesses", kind="redrafter.drafters.eagle:EAGLE3"),
    "block": Entry(
        about="layers that guess a block of tokens at once, as in DFlash, DSpark and JetSpec",
        kind="redrafter.drafters.block:KIND",
    ),
    "mtp": Entry(
        about="the module for multi-token prediction in the model's own checkpoint", make="redrafter.interop.mtp:make"
    ),
    "ngram": Entry(
        about="the tokens that followed the same n-gram earlier in this text; no training",
        make="redrafter.drafters.ngram:make",
    ),
    "none": Entry(about="nothing: plain decoding", make="redrafter.drafters.none:make"),
}
"""The drafters of this package by their names."""


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
    """The drafters that can be trained, and all of other packages, which may be others.

    >>> names()[:3]
    ('recurrent', 'medusa', 'eagle')
    """
    kinds = [name for name, entry in ENTRIES.items() if entry.kind is not None]
    return tuple(dict.fromkeys((*kinds, *_loaded, *packages())))


def named() -> tuple[str, ...]:
    """The drafters of this package that `drafter=` takes by name.

    >>> named()
    ('recurrent', 'mtp', 'ngram', 'none')
    """
    return tuple(name for name, entry in ENTRIES.items() if entry.make is not None)


def get(name: str) -> DrafterKind:
    """The kind of a name. A package's is imported now."""
    if name not in names():
        raise ConfigError(f"drafter must be one of {', '.join(names())}, got {shown(name)}")
    if name not in _loaded:
        entry = ENTRIES.get(name)
        kind = load(name) if entry is None or entry.kind is None else _imported(entry.kind)
        if not isinstance(kind, DrafterKind):
            raise ConfigError(f"the drafter {name!r} of the package {packages()[name]} is not one that is trained")
        _loaded[name] = kind
    return _loaded[name]


def maker(name: str) -> "Make | None":
    """What makes a drafter of a target by this name alone; None: it is no such name."""
    entry = ENTRIES.get(name)
    if entry is not None or name not in packages():
        return None if entry is None or entry.make is None else _imported(entry.make)
    make = load(name)

    def guarded(target: "Target") -> Any:
        try:
            drafter = make(target)
        except RedrafterError:
            raise
        except Exception as error:  # whatever the package raises
            raise _unusable(name, error) from error
        if not hasattr(drafter, "draft"):
            raise _unusable(name, f"it made no drafter, but {shown(drafter)}")
        return drafter

    return None if isinstance(make, DrafterKind) else guarded


def register(kind: DrafterKind) -> None:
    """Add a kind from outside this package. Its name must be free."""
    if (kind.name in ENTRIES or kind.name in names()) and _loaded.get(kind.name) != kind:
        raise ConfigError(f"a drafter kind named {kind.name!r} exists already; choose another name")
    _loaded[kind.name] = kind


def packages() -> dict[str, str]:
    """The drafters of other packages: name -> package. Nothing of them is imported."""
    return {name: _package(points[0]) for name, points in _points().items()}


def load(name: str) -> Any:
    """What a package has registered by this name, imported and checked. Any mistake in it is one line."""
    points = _points()[name]
    owners = sorted({_package(point) for point in points} | ({"redrafter"} if name in ENTRIES else set()))
    if len(owners) > 1:
        raise ConfigError(f"the packages {' and '.join(owners)} have each a drafter named {shown(name)}: remove one")
    try:
        value = points[0].load()
    except (Exception, SystemExit) as error:  # whatever an import raises
        raise _unusable(name, error) from error
    if isinstance(value, DrafterKind):
        if value.name != name:
            raise _unusable(name, f"its kind is named {value.name!r}")
    elif not callable(value):
        raise _unusable(name, f"it is neither a DrafterKind nor a function of the target, but {shown(value)}")
    return value


@functools.cache
def _points() -> "dict[str, list[EntryPoint]]":
    from importlib.metadata import entry_points

    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, []).append(point)
    return points


def _package(point: "EntryPoint") -> str:
    return point.value.partition(".")[0] if point.dist is None else point.dist.name


def _unusable(name: str, reason: BaseException | str) -> ConfigError:
    text = reason if isinstance(reason, str) else first_line(reason)
    return ConfigError(f"the drafter {name!r} of the package {packages()[name]} cannot be used: {text}")


def _imported(place: str | None) -> Any:
    assert place is not None
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
