"""The cache folder: what redrafter makes once and keeps for the next start.

Everything in it is written into a scratch place beside its own, synced to the disk and renamed, under a lock between
processes. Everything is checked when it is read, and made again when it differs: a folder has a manifest with the
checksum of each of its files, and holds no others; a JSON file has its checksum inside. Small files are hashed at each
start. A large one is hashed when its size or times differ from those at its last check, or after `forget_checks`.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from redrafter.errors import CacheUnavailable, CorruptCheckpoint

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SCRATCH = ".redrafter-part"
"""How the names of scratch files and folders end: no other program's do, should the cache be a folder of the user's."""
LARGE = 16 * 2**20
"""Bytes from which hashing would be felt at a start. It then takes longer than a tick of the file system's clock, so a
change after a check always changes the times."""
CHECKS, PROFILES, VERDICTS, LIBRARIES, TOKENIZERS = "checks", "profiles", "selfcheck", "native", "tokenizers"
"""The folders in the cache folder."""


def cache_folder() -> Path:
    """$REDRAFTER_CACHE, or `redrafter` under the user's cache folder."""
    if chosen := os.environ.get("REDRAFTER_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter"
    except RuntimeError as error:
        raise CacheUnavailable(
            "there is no home folder for the cache (HOME is not set and the user has no passwd entry); set "
            "REDRAFTER_CACHE to a folder you can write"
        ) from error


@contextlib.contextmanager
def cache_errors(need: str = "") -> Iterator[None]:
    """What a disk can do wrong, in one line; `need` says how much space is needed for what."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        where, full = cache_folder(), os.strerror(errno.ENOSPC)
        if full in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise CacheUnavailable(
                f"no space left in {where}{need and ': '}{need}; free some or set REDRAFTER_CACHE to a folder on "
                "another disk"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise CacheUnavailable(
            f"cannot use the cache folder {where} ({reason}); set REDRAFTER_CACHE to one you can write"
        ) from error


def is_intact(folder: Path) -> bool:
    """Whether a kept folder holds exactly the files that were written, as they were written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        names = {str(p.relative_to(folder)) for p in folder.rglob("[!.]*") if p.is_file()}
        return names - {MANIFEST} == set(files) and all(
            (folder / name).stat().st_size == entry["bytes"] and has_checksum(folder / name, entry["sha256"])
            for name, entry in files.items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def keep(path: Path, write: Callable[[Path], Any], intact: Callable[[Path], bool] = is_intact) -> Path:
    """The file or folder at `path`, written by `write` if it is missing or damaged; other processes wait meanwhile."""
    remove_left_over(path.parent)
    if not intact(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(_lock(path)):
            if not intact(path):  # another process may have been first
                if path.exists():
                    log.warning("%s is damaged; making it again", path)
                _replace(path, write)
    return path


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextlib.contextmanager
def process_lock(path: Path, wait: bool = True) -> Iterator[None]:
    """Keep other processes and threads out; a killed process's lock is free. filelock's Timeout if one is not to wait.

    The file goes while it is still locked: filelock does not take a lock whose file is gone.
    """
    with FileLock(path, timeout=-1 if wait else 0):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """The caller holds the lock of `path`, so what lies at the scratch place is of a process that was killed."""
    scratch = path.with_name(f".{path.name}{SCRATCH}")
    _remove(scratch)
    try:
        write(scratch)
        if scratch.is_dir():
            files = {str(p.relative_to(scratch)): p for p in sorted(scratch.rglob("*")) if p.is_file()}
            entries = {name: {"sha256": sha256_of(p), "bytes": p.stat().st_size} for name, p in files.items()}
            (scratch / MANIFEST).write_text(json.dumps({"files": entries}, indent=1))
        for file in [*scratch.rglob("*"), scratch]:
            _sync(file)
        if path.is_dir():
            shutil.rmtree(path)
        scratch.replace(path)
        _sync(path.parent)
    finally:
        _remove(scratch)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():  # not every disk can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_left_over(parent: Path) -> None:
    """Remove the scratch files and folders of processes that were killed: nobody holds their locks."""
    with contextlib.suppress(OSError):  # a cache that cannot be written
        for scratch in parent.glob(f".*{SCRATCH}"):
            lock = _lock(parent / scratch.name.removeprefix(".").removesuffix(SCRATCH))
            with contextlib.suppress(Timeout), process_lock(lock, wait=False):
                _remove(scratch)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file with its checksum."""
    text = json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(path.parent)
    with process_lock(_lock(path)):
        _replace(path, lambda scratch: scratch.write_text(text))


def read_json(path: Path) -> Any:
    """What `write_json` wrote; CorruptCheckpoint if it differs, OSError if it cannot be read."""
    try:
        whole = json.loads(path.read_bytes())
        if whole["sha256"] == _digest(whole["content"]):
            return whole["content"]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise CorruptCheckpoint(f"{path} is damaged, or of an earlier version")


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether a file has this checksum; a large one is hashed only if it is not as it was at the last check."""
    path = path.absolute()
    found = path.stat()
    if found.st_size < LARGE:
        return sha256_of(path) == sha256
    state = [sha256, str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    stamp = cache_folder() / CHECKS / f"{_digest(str(path))[:16]}.json"
    with contextlib.suppress(OSError, CorruptCheckpoint):
        if read_json(stamp) == state:
            return True
    if sha256_of(path) != sha256:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written: the next start hashes again
        write_json(stamp, state)
    return True


def forget_checks() -> None:
    """Let every large file be hashed again."""
    shutil.rmtree(cache_folder() / CHECKS, ignore_errors=True)


def entries() -> Iterator[tuple[Path, bool]]:
    """Each file and folder in the folders of the cache, and whether it is as it was written."""
    for name in (LIBRARIES, TOKENIZERS, VERDICTS, PROFILES):
        folder = cache_folder() / name
        remove_left_over(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir():
                yield path, is_intact(path)
            elif path.suffix == ".json":
                yield path, _is_readable(path)


def _is_readable(path: Path) -> bool:
    try:
        read_json(path)
    except (OSError, CorruptCheckpoint):
        return False
    return True


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
