"""`redrafter-mlx doctor`: what is installed, what is missing, and what this machine will run."""

import argparse
import platform
import shutil
import sys
from importlib import metadata

from redrafter_mlx.cli.options import add_model, open_engine
from redrafter_mlx.version import __version__


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)


def run(args: argparse.Namespace) -> None:
    for name, found in machine():
        print(f"{name:>14}  {found}")
    if args.model is not None:
        engine = open_engine(args)
        target = engine.target
        bits = f"{target.output_embedding.bits} bits" if target.quantised else str(target.dtype).split(".")[-1]
        print(f"{'would run':>14}  {target.name} ({target.kind}) in {bits}, {target.layer_count} layers")
        print(f"{'drafter':>14}  {engine.drafter.name}, {engine.shape.label}")
        print(f"{'self-check':>14}  passed: tree nodes get the logits of their paths")


def machine() -> list[tuple[str, str]]:
    rows = [("redrafter-mlx", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")]
    for name in ("mlx", "mlx-lm"):
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed: pip install mlx-lm, on Linux pip install 'mlx-lm[cpu]'"))
    if sys.platform == "linux":
        libc, version = platform.libc_ver()
        new_enough = libc == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
        rows.append((libc or "libc", version + ("" if new_enough else ": MLX needs glibc 2.35 or later")))
        compiler = shutil.which("g++") or shutil.which("clang++")
        rows.append(("C++ compiler", compiler or "none: MLX's fused operations run unfused"))
    try:
        import mlx.core as mx
    except ImportError as error:
        return [*rows, ("device", f"none: {error}")]
    from redrafter_mlx import profiles

    rows.append(("device", f"{mx.default_device()}{'' if mx.metal.is_available() else ', Metal is not available'}"))
    rows += [(k, str(v)) for k, v in mx.device_info().items() if k in ("device_name", "architecture", "memory_size")]
    try:
        kept = sorted(path.stem for path in profiles.folder().glob("*.json"))
    except RuntimeError as error:  # no home folder
        kept = [str(error)]
    return [*rows, ("profiles", "; ".join(kept) or "none; redrafter-mlx tune finds the fastest shape on this machine")]
