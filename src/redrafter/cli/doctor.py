"""`redrafter doctor`: what is installed, what is missing, and what would run on this machine."""

import argparse
import contextlib
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from redrafter.cli.console import Console
from redrafter.cli.options import RUNTIMES, add_target, find_drafter
from redrafter.cli.progress import waiting
from redrafter.drafters import registry
from redrafter.errors import CacheUnavailable, ConfigError, RedrafterError
from redrafter.version import __version__

if TYPE_CHECKING:
    from redrafter.engine.describe import RunDescription
    from redrafter.tuning.store import Profile

EPILOG = """examples:
  redrafter doctor
  redrafter doctor --model my-model --drafter my-drafter
  redrafter doctor --recheck
On a CPU, the default model is described without reading its weights. A model given with --model is loaded."""

OLDEST_TRANSFORMERS = (5, 18)

Finding = tuple[str, str, str]
"""What was looked at, its state, and what to do about it; the last is empty if all is well."""


def add(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument("--drafter", default="auto", help="as for the other commands (default: auto)")
    group.add_argument("--runtime", default="auto", choices=RUNTIMES, help="(default: as for other commands)")
    group.add_argument(
        "--recheck",
        action="store_true",
        help="forget all earlier checks of models and files; check this model and every kept file",
    )


def run(args: argparse.Namespace) -> None:
    find_drafter(args.drafter)
    if args.recheck:
        from redrafter.cache_folder import forget_checks
        from redrafter.targets.verdicts import forget

        with contextlib.suppress(CacheUnavailable):  # which is a finding
            forget()
            forget_checks()
    console = Console()
    table = Table(show_header=False, box=None)
    with waiting(Console(stderr=True), "checking"):
        findings = [*installation(), *drafters(), *storage(), *run_findings(args)]
    for name, state, advice in findings:
        mark = Text("!!", "yellow") if advice else Text("ok", "green")
        table.add_row(mark, name, Text(f"{state} — {advice}" if advice else state))
    console.print(table)


def installation() -> list[Finding]:
    """Packages and hardware."""
    import torch

    version = tuple(int(x) for x in metadata.version("transformers").split(".")[:2])
    upgrade = "" if version >= OLDEST_TRANSFORMERS else "pip install 'transformers>=5.18'"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: decoding runs on the CPU"
    return [
        ("redrafter", f"{__version__}, Python {platform.python_version()} in {sys.prefix}", ""),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores", ""),
        ("transformers", metadata.version("transformers"), upgrade),
        ("GPU", gpu, ""),
    ]


def drafters() -> list[Finding]:
    """The drafters that have a name; those of other packages are imported."""
    found = [("drafters", ", ".join(registry.ENTRIES), "")]
    for name, package in registry.packages().items():
        try:
            registry.load(name)
        except ConfigError as error:
            found.append((f"drafter {name}", str(error), f"update or uninstall {package}"))
        else:
            found.append((f"drafter {name}", f"of the package {package}", ""))
    return found


def storage() -> list[Finding]:
    """The default model, the cache folder and the profiles in it."""
    from redrafter.cache_folder import cache_folder, entries
    from redrafter.targets.default import NAME, NEEDED_BYTES, default_state
    from redrafter.targets.verdicts import folder as verdicts_folder
    from redrafter.targets.verdicts import kept
    from redrafter.tuning.store import saved_profiles

    try:
        folder = cache_folder()
        state, advice = default_state()
        kept_files = dict(entries())
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        usable = os.access(existing, os.W_OK) and free > NEEDED_BYTES
        profiles = "; ".join(describe_profile(profile) for profile in saved_profiles())
        checks = f"{len(kept())} kept in {verdicts_folder()}"
    except (RedrafterError, OSError) as error:
        return [("cache folder", "not usable", str(error))]
    return [
        (NAME, state, advice),
        (
            "cache folder",
            f"{folder}, {free / 2**30:.1f} GiB free",
            "" if usable else "set REDRAFTER_CACHE to a writable folder on a disk with free space",
        ),
        describe_files(kept_files, folder),
        ("passed checks", f"{checks}; --recheck forgets them", ""),
        ("profiles", profiles or "none; redrafter tune measures what steps cost on this machine", ""),
    ]


def describe_files(intact: dict[Path, bool], folder: Path) -> Finding:
    """Whether everything that is kept is as it was written."""
    damaged = [str(path.relative_to(folder)) for path, whole in intact.items() if not whole]
    if not damaged:
        return "kept files", f"{len(intact)}, all as they were written", ""
    again = "the next use makes them again; for a profile, run redrafter tune"
    return "kept files", f"{len(intact)}, damaged or of an earlier version: {', '.join(damaged)}", again


def describe_profile(profile: "Profile") -> str:
    drafter, *_ = profile.key["drafter"].split()
    where = f"{profile.key['dtype']} on {profile.key['device']}"
    unit, first, *_ = profile.prices["passes"]  # `planning.linear.LinearPrice.saved`
    return f"{profile.target_name} with {drafter} in {where}: {1000 * unit * first:.3g} ms a token"


def run_findings(args: argparse.Namespace) -> list[Finding]:
    """What the other commands would run with the same options."""
    from redrafter.engine.describe import describe

    try:
        found = describe(args.model, args.drafter, dtype=args.dtype, device=args.device, runtime=args.runtime)
    except RedrafterError as error:
        if args.model is not None or args.drafter != "auto" or args.device is not None:
            raise  # the user named something that does not work
        return [("would run", "nothing", str(error))]
    dtype = str(found.dtype).removeprefix("torch.")
    return [
        ("would run", f"{found.model} on {found.device} in {dtype}, {found.runtime} runtime", ""),
        ("drafter", describe_drafter(found), ""),
        *([("its format", found.about, "")] if found.about else []),
        ("faster path", found.kernels, ""),
        ("exactness", f"rule seeded: {found.exactness_text}", ""),
    ]


def describe_drafter(found: "RunDescription") -> str:
    if found.shape is None:
        return "none: plain decoding"
    shape = f"W={found.shape.width}, L={found.shape.length}, N={found.shape.budget}"
    prices = ", prices of this machine" if found.tuned else ""
    return f"{found.drafter}, {shape} (default shape{prices})"
