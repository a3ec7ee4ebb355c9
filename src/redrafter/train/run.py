"""A training run on disk: its settings, and checkpoints from which it goes on bit for bit.

With `--states memory` a resumed run computes hidden states again, in other batches: the last bits may differ on a GPU.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from redrafter.errors import ConfigError, CorruptCheckpoint, RedrafterError

log = logging.getLogger(__name__)

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

    @property
    def begun(self) -> bool:
        """Whether training has begun here, so that its texts are settled."""
        return (self.folder / SETTINGS).exists()

    def check(self, settings: Mapping[str, Any]) -> None:
        """The same settings as before go on; others are refused, for they would not continue this run.

        A run that has no checkpoint yet has nothing to continue: it may begin anew with any.
        """
        path = self.folder / SETTINGS
        if not path.exists():
            if (self.folder / "config.json").exists():
                raise ConfigError(f"{self.folder} holds a drafter or model already; choose another folder")
            return
        if not self._all():
            return
        try:
            before = _flat(json.loads(path.read_text()))
        except ValueError as error:
            raise CorruptCheckpoint(f"{path} is damaged ({error}); choose another folder") from error
        for name, value in _flat(json.loads(json.dumps(settings))).items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{self.folder} was begun with {name} {before.get(name)}, now it is {value}: give the same "
                    "settings to go on, or another folder"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        self.check(settings)
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / SETTINGS, json.dumps(settings, indent=2) + "\n")

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

    def time_writing(self, tensors: Mapping[str, torch.Tensor]) -> float:
        """Seconds to write so much into the folder. The file goes again."""
        scratch, began = self.folder / ".speed.part", time.perf_counter()
        with disk_errors(self.folder):
            try:
                save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, scratch)
            finally:
                scratch.unlink(missing_ok=True)
        return time.perf_counter() - began

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """The newest checkpoint that can be read; None if there never was one."""
        found = self._all()
        for folder in reversed(found):
            try:
                facts = json.loads((folder / "state.json").read_text())
                return load_file(folder / "state.safetensors"), facts
            except (OSError, ValueError, SafetensorError) as error:
                log.warning("the checkpoint %s cannot be read (%s)", folder, error)
        if found:
            raise CorruptCheckpoint(f"no checkpoint in {self.checkpoints} can be read; choose another folder")
        return None

    def _all(self) -> list[Path]:
        return sorted(self.checkpoints.glob("update-*"))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One level: what a setting is called when it differs.

    >>> _flat({"train": {"lr": 1.0}, "texts": 3})
    {"train's lr": 1.0, 'texts': 3}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}'s {k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


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
