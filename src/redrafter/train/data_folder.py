"""A folder of training data being made: what it is made with, which shards are whole, what is still to do."""

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.drafters.checkpoint import same_weights
from redrafter.errors import ConfigError, CorruptCheckpoint, RedrafterError
from redrafter.texts import Texts
from redrafter.train import dataset as disk

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distilled:
    """What a folder holds now."""

    rows: int
    tokens: int
    answer_tokens: int
    dropped: dict[str, int]
    """How many prompts or texts were of no use, by reason."""


@dataclass
class Begun:
    """Where the next shard goes on: a function of the settings and the shards before it."""

    rows: int
    used: list[int]
    """Pieces taken from each source so far, good and bad."""
    seen: set[int]
    """Marks of all prompts so far."""


class Folder:
    """Goes on with what lies there if target and settings are the same, and refuses if they are not."""

    def __init__(self, path: Path, target: dict[str, str], settings: dict[str, Any]) -> None:
        self.path = path
        before = disk.read_manifest(path) or {"shards": [], "complete": False}
        if "settings" in before:
            check_same(path, before, target, settings)
        self.entries: list[dict[str, Any]] = list(before["shards"])
        self.complete: bool = before["complete"]
        self.manifest = {"target": target, "settings": settings}

    @property
    def finished(self) -> int:
        return sum(int(entry["rows"]) for entry in self.entries)

    def open(self) -> None:
        """Make the folder, or clear away what a killed run left half-written."""
        with disk.write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            disk.remove_scratch(self.path)
        if not self.entries:
            self._write(complete=False)

    def read(self, index: int, begun: Begun) -> int | None:
        """Take in a shard that lies there whole: how many rows it has, or None."""
        if index >= len(self.entries):
            return None
        entry = self.entries[index]
        try:
            _, marks = disk.read_shard(self.path, entry)
        except CorruptCheckpoint:
            log.warning("%s is missing or damaged; making it again", self.path / disk.shard_name(index))
            return None
        begun.seen.update(marks)
        begun.used[:] = entry["used"]
        return int(entry["rows"])

    def add(self, index: int, texts: Texts, marks: list[int], used: list[int], dropped: dict[str, int]) -> int:
        """The shard first, the manifest after it: a kill in between loses the shard and nothing else."""
        known = {"used": list(used), "dropped": dropped}
        if len(texts):
            self.entries[index : index + 1] = [disk.write_shard(self.path, index, texts, marks) | known]
        elif index:  # the rest of the file was of no use
            last = self.entries[index - 1]
            self.entries[index - 1] = last | {
                "used": list(used),
                "dropped": dict(Counter(last["dropped"]) + Counter(dropped)),
            }
        self._write(complete=False)
        return len(texts)

    def close(self) -> Distilled:
        if not self.entries:
            raise ConfigError(f"no prompt was of use, so {self.path} holds no texts: all were empty or too long")
        if not self.complete:
            self._write(complete=True)
        dropped: Counter[str] = Counter()
        for entry in self.entries:
            dropped.update(entry["dropped"])
        rows, tokens, answers = (sum(e[k] for e in self.entries) for k in ("rows", "tokens", "answer_tokens"))
        return Distilled(rows, tokens, answers, dict(dropped))

    def _write(self, complete: bool) -> None:
        self.complete = complete
        disk.write_manifest(self.path, self.manifest | {"shards": self.entries, "complete": complete})


def settled(path: Path, name: str) -> Any:
    """A setting that the folder was begun with, if it was."""
    manifest = disk.read_manifest(path)
    return None if manifest is None else manifest["settings"].get(name)


def digest(items: Sequence[str] | None) -> str | None:
    """Tells one file of prompts from another."""
    return None if items is None else hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()[:16]


def check_same(path: Path, before: dict[str, Any], target: dict[str, str], settings: dict[str, Any]) -> None:
    """A folder holds the data of one target and one set of settings."""
    made = before["target"]
    shared = {
        "another tokenizer": made.get("tokenizer") == target.get("tokenizer"),
        "other weights": same_weights(made, target),
    }
    for other, same in shared.items():
        if not same:
            made_by, own = made.get("name"), target.get("name")
            raise ConfigError(f"{path} was made with {made_by}, but {own} has {other}; choose another folder")
    for name, value in settings.items():
        old = before["settings"].get(name)
        if old != value:
            raise ConfigError(f"{path} was made with {name}={old}, not {value}; choose another folder")


def check_disk(path: Path, rows: int, row_bytes: int) -> None:
    """Say what it may take and refuse before hours of work would end on a full disk."""
    need = rows * row_bytes
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    log.info("%d texts to make, at most %d MiB in %s", rows, (need >> 20) + 1, path)
    if free < need:
        raise RedrafterError(
            f"{rows} texts may need {need >> 20} MiB, but {nearest} has {free >> 20} MiB free: free some, choose "
            "another folder, or ask for fewer or shorter texts"
        )
