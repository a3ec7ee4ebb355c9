"""Training data on disk: texts in checksummed shards, listed in a manifest."""

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from redrafter.drafters.checkpoint import compare, identity
from redrafter.errors import CorruptCheckpoint, DrafterMismatch, RedrafterError
from redrafter.targets import Target
from redrafter.texts import Texts, concatenate

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ANEW = "run redrafter distill again with the same settings to make it anew"


def shard_name(index: int) -> str:
    return f"texts-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, texts: Texts, marks: Sequence[int]) -> dict[str, Any]:
    """One file, moved into place whole; returns what the manifest says of it.

    `marks` are equal for equal prompts, so that a run that goes on knows those it had.
    """
    tensors = {name: value for name, value in vars(texts).items() if value is not None}
    tensors["marks"] = torch.tensor(list(marks), dtype=torch.int64)
    content = save(tensors)
    _put(folder / shard_name(index), content)
    return {
        "file": shard_name(index),
        "rows": len(texts),
        "tokens": len(texts.tokens),
        "answer_tokens": len(texts.tokens) - int(texts.prompts.sum()),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def read_shard(folder: Path, entry: dict[str, Any]) -> tuple[Texts, list[int]]:
    """A shard's texts and marks, or CorruptCheckpoint."""
    path = folder / entry["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"{path} is missing or cannot be read; {ANEW}") from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CorruptCheckpoint(f"{path} is damaged (its checksum differs); {ANEW}")
    try:
        tensors = load(content)
        marks = tensors.pop("marks").tolist()
        return Texts(**tensors), marks
    except (SafetensorError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path} holds no texts as this version writes them; {ANEW}") from error


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    _put(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(f"cannot read {folder / MANIFEST}: {error}; choose another folder") from error
    if not _well_formed(manifest):
        raise CorruptCheckpoint(f"{folder / MANIFEST} does not describe training data; choose another folder")
    return dict(manifest)


def _well_formed(manifest: Any) -> bool:
    kinds = {"target": dict, "settings": dict, "shards": list, "complete": bool}
    told = {"file", "rows", "tokens", "answer_tokens", "sha256", "used", "dropped"}
    return (
        isinstance(manifest, dict)
        and all(isinstance(manifest.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(entry, dict) and told <= set(entry) for entry in manifest["shards"])
    )


def remove_scratch(folder: Path) -> None:
    """What a killed run had not finished writing."""
    for name in (MANIFEST, "texts-*.safetensors"):
        for left_over in folder.glob(f".{name}.part"):
            left_over.unlink(missing_ok=True)


def _put(path: Path, content: bytes) -> None:
    """All or nothing: the file appears under its name only when it is whole."""
    scratch = path.with_name(f".{path.name}.part")
    with write_errors(path.parent):
        try:
            scratch.write_bytes(content)
            scratch.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """What can go wrong with a disk, in one line."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise RedrafterError(
                f"no space left in {folder}; what is finished is intact: free some and run the same command to go on"
            ) from error
        reason = os.strerror(error.errno) if error.errno else error
        raise RedrafterError(f"cannot write to {folder} ({reason}); choose another folder") from error


def target_entry(target: Target) -> dict[str, str]:
    """What a manifest says of the target that wrote the texts."""
    return identity(target) | {"vocabulary": str(target.vocab_size)}


def read_texts(folder: Path, target: Target) -> Texts:
    """All texts of a folder that `redrafter distill` made with this target's tokenizer."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise CorruptCheckpoint(f"{folder} is no folder of training data: it has no {MANIFEST}; see redrafter distill")
    compare(manifest["target"], target, f"the data in {folder}", "it teaches that model's ways")
    size, wanted = manifest["target"].get("vocabulary"), str(target.vocab_size)
    if size not in (None, wanted):  # None: of an earlier version
        raise DrafterMismatch(
            f"the data in {folder} was made for a vocabulary of {size} tokens, but {target.name} has {wanted}; "
            "make the data with this target"
        )
    if not manifest["shards"]:
        raise CorruptCheckpoint(f"{folder} holds no texts; run redrafter distill first")
    if not manifest["complete"]:
        rows = sum(entry["rows"] for entry in manifest["shards"])
        log.warning("%s is not complete: using the %d texts there are", folder, rows)
    parts = []
    for entry in manifest["shards"]:
        texts, _ = read_shard(folder, entry)
        if not texts.within(target.vocab_size):
            raise CorruptCheckpoint(
                f"{folder / entry['file']} has token ids outside the vocabulary of {target.vocab_size} of "
                f"{target.name}; make the data with this target"
            )
        parts.append(texts)
    return concatenate(parts)
