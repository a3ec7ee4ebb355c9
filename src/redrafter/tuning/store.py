"""Profiles: the prices of steps that `redrafter tune` measured, one JSON file for each target, drafter and machine."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from redrafter.bounds import check
from redrafter.cache_folder import PROFILES, cache_folder, read_json, write_json
from redrafter.config import require
from redrafter.core.step import Drafter
from redrafter.drafters.checkpoint import identity
from redrafter.drafters.traits import identity_of
from redrafter.errors import CacheUnavailable, ConfigError, CorruptCheckpoint
from redrafter.kernels.threads import thread_count
from redrafter.planning.costs import Costs
from redrafter.results import hardware
from redrafter.targets import Target
from redrafter.version import __version__

log = logging.getLogger(__name__)

PROFILE_VERSION = f"{__version__}, format 3"
"""Prices change with the code, so a profile is valid for one version of redrafter and one file format."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What steps cost. The prices are `planning.costs.Costs.saved`."""

    key: dict[str, str]
    """What they depend on; see `profile_key`."""
    target_name: str
    prices: dict[str, tuple[float, ...]]
    version: str = PROFILE_VERSION

    def __post_init__(self) -> None:
        check(self)
        known = {"passes", "drafts"} == self.prices.keys() and all(len(each) > 1 for each in self.prices.values())
        require(known, "its prices are not those of passes and drafts")


def profile_key(target: Target, drafter: Drafter, runtime: str) -> dict[str, str]:
    """Everything that prices depend on."""
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
        content["prices"] = {name: tuple(prices) for name, prices in content["prices"].items()}
        return Profile(**content)
    except FileNotFoundError:
        return None
    except (OSError, CorruptCheckpoint, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s is damaged and is ignored (%s): run redrafter tune again", path, type(error).__name__)
        return None


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


def use_profile(costs: Costs, target: Target, drafter: Drafter, runtime: str) -> bool:
    """Begin with the prices that were measured for this combination, if there are any."""
    profile = find_profile(target, drafter, runtime)
    if profile is None:
        return False
    try:
        costs.restore(profile.prices)
    except ConfigError as error:
        log.warning("the profile of %s is ignored (%s): run redrafter tune again", target.name, error)
        return False
    return True
