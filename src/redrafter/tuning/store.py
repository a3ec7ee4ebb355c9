"""Profiles on disk: one JSON file for each combination of target, drafter and machine, and how `load` finds it."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from redrafter.cache_folder import PROFILES, cache_folder, read_json, write_json
from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import NoDrafter
from redrafter.drafters.checkpoint import identity
from redrafter.drafters.traits import drafts, identity_of
from redrafter.errors import CacheUnavailable, ConfigError, CorruptCheckpoint
from redrafter.kernels.threads import thread_count
from redrafter.results import hardware
from redrafter.targets import Target
from redrafter.tuning.profile import (
    PROFILE_VERSION,
    BestShape,
    DraftCost,
    Profile,
    SimulatedShape,
    StepCost,
    VerifyCost,
)

log = logging.getLogger(__name__)

ROW_CLASSES: dict[str, type] = {
    "verify_costs": VerifyCost,
    "draft_costs": DraftCost,
    "simulated": SimulatedShape,
    "step_costs": StepCost,
    "best_shapes": BestShape,
}
"""Fields of `Profile` that are lists of dataclasses in the file."""


def profile_key(target: Target, drafter: Drafter, runtime: str) -> dict[str, str]:
    """Everything that step costs and tokens/step depend on."""
    on_gpu = target.device.type == "cuda"
    return {
        "target": identity(target)["weights"],
        # A quantised copy may share its embeddings with the original, and then differs only in size.
        "bytes": str(target.weight_bytes),
        "forward": target.forward_kind,  # a model that the user loaded keeps its own forward
        "drafter": identity_of(drafter),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else str(hardware().get("cpu", "cpu")),
        "runtime": resolve_runtime(target.device.type, runtime),
        "threads": "any" if on_gpu else str(thread_count()),
    }


def resolve_runtime(device_type: str, runtime: str) -> str:
    """The runtime that is really used: "auto" is compiled on a GPU, and a CPU always runs eagerly."""
    if device_type != "cuda":
        return "eager"
    return "compiled" if runtime == "auto" else runtime


def profile_folder() -> Path:
    return cache_folder() / PROFILES


def profile_path(target_name: str, key: dict[str, str]) -> Path:
    readable = re.sub(r"[^\w.-]+", "-", target_name)[-60:]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return profile_folder() / f"{readable}-{digest[:16]}.json"


def save_profile(profile: Profile) -> Path:
    """Write the file. Replaces an older profile of the same combination."""
    path = profile_path(profile.target_name, profile.key)
    try:
        write_json(path, dataclasses.asdict(profile))
    except OSError as error:
        reason = error.strerror or error
        raise CacheUnavailable(
            f"cannot write the profile to {path.parent} ({reason}); set REDRAFTER_CACHE to a writable folder"
        ) from error
    return path


def read_profile(path: Path) -> Profile | None:
    """None, with one line in the log, for a file that is damaged or written by another version."""
    try:
        content = read_json(path)
        if content["version"] != PROFILE_VERSION:
            log.warning(
                "%s was written by redrafter %s and is ignored: run redrafter tune again", path, content["version"]
            )
            return None
        profile = Profile(**{name: _parse_field(name, value) for name, value in content.items()})
        profile.best_shape(1)  # raises ConfigError if the file lists no best shape
        return profile
    except FileNotFoundError:
        return None
    except (OSError, CorruptCheckpoint, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s is damaged and is ignored (%s): run redrafter tune again", path, type(error).__name__)
        return None


def _parse_field(name: str, value: Any) -> Any:
    if name not in ROW_CLASSES:
        return value
    rows = []
    for row in value:
        shape = {"shape": row["shape"] and Shape(**row["shape"])} if "shape" in row else {}
        rows.append(ROW_CLASSES[name](**(row | shape)))
    return tuple(rows)


def saved_profiles() -> Iterator[Profile]:
    """All readable profiles of this machine."""
    for path in sorted(profile_folder().glob("*.json")):
        if (profile := read_profile(path)) is not None:
            yield profile


def find_profile(target: Target, drafter: Drafter, runtime: str) -> Profile | None:
    """The profile of exactly this combination, or None if it was not tuned on this machine."""
    try:
        if not any(profile_folder().glob("*.json")):  # the usual case: skip hashing the weights
            return None
    except (OSError, CacheUnavailable):
        return None
    key = profile_key(target, drafter, runtime)
    profile = read_profile(profile_path(target.name, key))
    if profile is not None and profile.key != key:
        log.warning("%s belongs to another combination and is ignored", profile_path(target.name, key))
        return None
    return profile


def apply_profile(target: Target, drafter: Drafter, runtime: str) -> tuple[Drafter, Shape | None]:
    """The drafter and shape that the profile recommends for one row.

    Without a profile: the drafter as it is and no shape. If plain decoding is the fastest: `NoDrafter`.
    """
    if not drafts(drafter) or (profile := find_profile(target, drafter, runtime)) is None:
        return drafter, None
    shape = profile.best_shape(1)
    if shape is None:
        log.info("plain decoding: redrafter tune measured that it is the fastest here; give a shape to draft anyway")
        return NoDrafter(), None
    log.debug("tuned for this machine: W=%d, L=%d, N=%d", shape.width, shape.length, shape.budget)
    return drafter, shape
