"""What the plug-in refuses before anything is loaded, and how SGLang's user hears of it."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from redrafter.config import require
from redrafter.errors import ConfigError, RedrafterError, UnsupportedTarget

log = logging.getLogger(__name__)

NAME = "REDRAFTER"
TESTED = ("0.5.16",)


def check(server_args: Any) -> None:
    """Raise if this version, or what the server was asked for, cannot work."""
    check_version()
    if not server_args.enable_return_hidden_states:
        raise UnsupportedTarget(
            f"{NAME} reads the target's hidden states; start SGLang with --enable-return-hidden-states"
        )
    require(server_args.pp_size == 1, f"{NAME} works on one pipeline stage; use tensor parallelism instead")


def check_version() -> None:
    import sglang

    version = sglang.__version__.split("+")[0]
    if version not in TESTED:
        raise ConfigError(
            f"redrafter was tested with SGLang {', '.join(TESTED)}, not with {sglang.__version__}; "
            f"install sglang=={TESTED[-1]}"
        )


@contextlib.contextmanager
def said() -> Iterator[None]:
    """A user's mistake as one line of the log, before SGLang's traceback."""
    try:
        yield
    except RedrafterError as error:
        log.error("redrafter: %s", error)
        raise
