"""What `redrafter-mlx tune` found on this machine, one file for each model, drafter and device."""

import json
import os
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from redrafter_mlx.target import Target


def folder() -> Path:
    """$REDRAFTER_CACHE, or `redrafter` under the user's cache folder; profiles are in `mlx` below it."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("REDRAFTER_CACHE") or f"{caches}/redrafter") / "mlx"


def path(target: Target, drafter: str) -> Path:
    name = f"{target.name}-{target.precision}-{drafter}-{mx.default_device().type}"
    return folder() / f"{re.sub(r'[^A-Za-z0-9.+-]+', '-', name)}.json"


def find(target: Target, drafter: str) -> str | None:
    """The fastest shape, or "plain"; None if there is no readable profile."""
    try:
        return str(json.loads(path(target, drafter).read_text())["fastest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(target: Target, drafter: str, profile: dict[str, Any]) -> Path:
    where = path(target, drafter)
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(profile, indent=1) + "\n")
    return where
