"""Paths that arguments name: each kind is checked when it is read, before a model is loaded or anything measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from redrafter.errors import ConfigError

CheckPath = Callable[[Path], str | None]
"""What is wrong with a path; None if it can be used."""


def read_path(flag: str, text: str, checks: tuple[Any, ...]) -> Path:
    """The path in an argument. `checks` are what its annotation adds: those below."""
    if not text:  # as a path, the current folder
        raise ConfigError(f"{flag} is empty: name a file or a folder")
    path = Path(text)
    try:
        problem = next(filter(None, (check(path) for check in checks)), None)
    except (OSError, ValueError) as error:  # a name that is too long, or a folder that may not be read
        problem = f"{path}: {getattr(error, 'strerror', error)}"
    if problem:
        raise ConfigError(f"{flag}: {problem}")
    return path


def no_readable_file(path: Path) -> str | None:
    if path.is_dir():
        return f"{path} is a folder; name a file"
    return None if path.exists() else f"there is no file {path}"


def no_readable_folder(path: Path) -> str | None:
    if path.is_dir():
        return None
    return f"{path} is a file; name a folder" if path.exists() else f"there is no folder {path}"


def no_new_file(path: Path) -> str | None:
    return f"{path} is a folder; name a file" if path.is_dir() else no_new_folder(path.parent)


def no_new_folder(path: Path) -> str | None:
    """What is missing of the folder and those above it is created."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return None if nearest.is_dir() else f"{nearest} is a file; name a folder"


InputFile = Annotated[Path, no_readable_file]
InputFolder = Annotated[Path, no_readable_folder]
OutputFile = Annotated[Path, no_new_file]
OutputFolder = Annotated[Path, no_new_folder]
