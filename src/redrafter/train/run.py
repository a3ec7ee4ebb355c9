"""A training run on disk: its settings, and checkpoints from which it goes on bit for bit."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from redrafter.errors import ConfigError, CorruptCheckpoint, RedrafterError

SETTINGS = "run.json"
KEPT = 2
"""Checkpoints kept: should the newest be damaged, there is one before it."""


class TrainingFailed(RedrafterError):
    """Training cannot go on; what was learned before lies in the last checkpoint."""


class Run:
    """The folder of a run. `begin` either starts it, goes on with it, or refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

    def begin(self, settings: Mapping[str, Any]) -> None:
        """The same settings as before go on; others are refused, for they would not continue this run."""
        plain = json.loads(json.dumps(settings))
        path = self.folder / SETTINGS
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if (self.folder / "config.json").exists():
                    raise ConfigError(f"{self.folder} holds a drafter or model already; choose another folder")
                _write(path, json.dumps(plain, indent=2) + "\n")
                return
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise CorruptCheckpoint(f"{path} is damaged ({error}); choose another folder") from error
        for name in sorted(before.keys() | plain.keys()):
            if before.get(name) != plain.get(name):
                raise ConfigError(
                    f"{self.folder} was begun with {name}={before.get(name)}, now it is {plain.get(name)}: "
                    "give the same settings to go on, or another folder"
                )

    @property
    def finished(self) -> bool:
        return (self.folder / "report.html").exists()

    def save(self, update: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """A checkpoint appears whole or not at all; older ones go."""
        scratch = self.checkpoints / ".part"
        with disk_errors(self.folder):
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, scratch / "state.safetensors")
            (scratch / "state.json").write_text(json.dumps({"update": update, **facts}))
            final = self.checkpoints / f"update-{update:08d}"
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            for old in self._all()[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """The newest checkpoint that can be read, or None."""
        for folder in reversed(self._all()):
            try:
                facts = json.loads((folder / "state.json").read_text())
                return load_file(folder / "state.safetensors"), facts
            except (OSError, ValueError, SafetensorError):
                continue
        return None

    def _all(self) -> list[Path]:
        return sorted(self.checkpoints.glob("update-*"))


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text)
    scratch.replace(path)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """What a disk can do wrong, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise TrainingFailed(
                f"no space left in {folder}: free some and give the same command again; it goes on from the last "
                "checkpoint"
            ) from error
        raise TrainingFailed(f"cannot write to {folder}: {error}") from error
