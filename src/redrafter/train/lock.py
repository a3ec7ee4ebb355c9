"""One process at a time writes to a folder of data or to that of a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from redrafter.cache_folder import process_lock
from redrafter.errors import ConfigError, RedrafterError


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process writes to."""
    with contextlib.ExitStack() as stack:
        if not folder.exists():
            stack.callback(_remove_empty, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(process_lock(folder / ".lock", wait=False))
        except Timeout:
            raise ConfigError(
                f"another process writes to {folder}: wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            raise RedrafterError(
                f"cannot write to {folder} ({error.strerror or error}); choose another folder"
            ) from error
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
