"""What the plug-ins for other engines share: the named drafter, the version check, errors as lines of the log."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from redrafter.drafters import RecurrentDrafter, RecurrentNet, shipped
from redrafter.drafters.load import bind_own
from redrafter.errors import ConfigError, DrafterMismatch, RedrafterError, UnsupportedTarget
from redrafter.interop import folders
from redrafter.interop.find import WITH_NGRAMS, find, stands_alone
from redrafter.targets import TargetInfo
from redrafter.targets.attention import recurrent_kind

log = logging.getLogger(__name__)

OWN = f"give auto, recurrent, recurrent{WITH_NGRAMS}, or a folder or Hub id of a recurrent drafter"


def recurrent_drafter(name: str, target: TargetInfo, engine: str, setting: str) -> RecurrentDrafter:
    """The named drafter on this target; `recurrent` is the one that comes with the package.

    `setting` says where a user of the engine names a drafter.
    """
    if name == "recurrent":
        found = shipped.find(target)
        if found is None:
            raise DrafterMismatch(
                f"no drafter comes with the package for {target.name}; make one (redrafter train) and name its folder: "
                f"{setting}"
            )
        name = str(found)
    if not name or stands_alone(name):
        raise ConfigError(f"{engine} takes no drafter {name!r}: {OWN}; {setting}")
    net = folders.read_for(find(name), target)
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{name} is no recurrent drafter; {engine} itself takes other kinds")
    drafter = bind_own(net, target)
    assert isinstance(drafter, RecurrentDrafter)
    return drafter


def refuse_recurrent(config: Any, engine: str) -> None:
    """Raise for a model with a recurrent state: how the engine rolls it back after a rejected guess was not tested."""
    kind = recurrent_kind(config)
    if kind is not None:
        raise UnsupportedTarget(
            f"{config.model_type} keeps a recurrent state (layers of the kind {kind!r}); inside {engine}, redrafter "
            "takes models with attention only; use redrafter's own server, or start the engine without redrafter"
        )


def check_tested(engine: str, version: str, tested: Sequence[str], install: str) -> None:
    """Raise for a version of the engine that was not tested."""
    if version.split("+")[0] not in tested:
        raise ConfigError(
            f"redrafter was tested with {engine} {', '.join(tested)}, not with {version}; install {install}"
        )


@contextlib.contextmanager
def said() -> Iterator[None]:
    """A user's mistake as one line of the log, before the engine's traceback."""
    try:
        yield
    except RedrafterError as error:
        log.error("redrafter: %s", error)
        raise
