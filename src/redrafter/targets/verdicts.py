"""Keeps verdicts on disk, so that a model which passed the self-check is not checked at every start.

The trials of the CPU's forward passes are kept in the same way. A verdict holds for one set of model files, one device,
dtype and attention implementation, one version of torch and transformers, and the code that the check runs. On a GPU
the comparison of bits (`cuda/same_bits.py`) is kept too, for the weights that are in memory instead of files, since a
user may have changed them. Only a pass is kept: a model that fails is checked, and refused, at every start.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from redrafter.cache_folder import MANIFEST, VERDICTS, cache_folder, read_json, write_json
from redrafter.errors import CacheUnavailable, CorruptCheckpoint
from redrafter.kernels.cpu import library
from redrafter.results import versions
from redrafter.targets.cpu import passes
from redrafter.targets.cuda.layer_parts import TRANSFORMERS_HOOKS
from redrafter.targets.fingerprint import fingerprint
from redrafter.targets.selfcheck import use_attention
from redrafter.targets.target import Target
from redrafter.version import __version__

log = logging.getLogger(__name__)

CODE = ("core", "kernels", "targets")
"""Packages whose code decides the verdict."""
LIBRARIES = ("torch.", "transformers.")
"""Modules whose code has a version, which is part of the verdict's key."""
VARIABLES = ("CUBLAS", "NVIDIA_TF32", "TRITON_")
"""Beginnings of the names of environment variables that can change the bits of a pass."""


def folder() -> Path:
    return cache_folder() / VERDICTS


def check_once(target: Target, check: Callable[[Target], None]) -> None:
    """Run the self-check unless this model passed it before. `check` may switch the model to another attention."""
    path = _path(target, {"check": "tree"})
    passed = read(path)
    if passed is None:
        check(target)
        write(path, target.config._attn_implementation)
    elif passed != target.config._attn_implementation:
        use_attention(target, passed)
        log.debug("%s: using %s attention, as the self-check found before", target.name, passed)


def install_cpu_forwards_once(target: Target) -> None:
    """Replace forwards on a CPU. Forwards that passed their trials before are not tried again."""
    if not passes.replaceable(target):
        return
    path = _path(target, {"check": "cpu", "library": library.built()})
    chosen = read(path)
    if chosen is None:
        write(path, passes.install_cpu_forwards(target))
    else:
        passes.install_chosen(target, chosen)


def bits_path(target: Target, compiles: bool) -> Path | None:
    """The file of the verdict that a token has the same bits in every pass; None where it is not kept."""
    try:
        gpu = _gpu(target.device)
        if gpu is None or not _plain(target.model):
            return None
        weights = fingerprint(target.model, target.device)
    except (
        Exception
    ) as error:  # a setting or tensor that cannot be read, or too little memory: the check itself goes on
        log.debug("no verdict is kept for %s: %s", target.name, error)
        return None
    if weights is None:
        return None
    about = {"check": "bits", "compiles": compiles, "weights": weights, "modules": _classes(target.model)} | gpu
    return file_for(about | _key(target, []))


def _gpu(device: torch.device) -> dict[str, Any] | None:
    """What decides the bits of a pass on a GPU besides its name; None for other devices."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    return {
        "gpu": [found.major, found.minor, found.multi_processor_count, found.total_memory],
        "cuda": [torch.version.cuda, torch.version.hip],
        "matmul": [
            str(matmul.fp32_precision),  # torch.get_float32_matmul_precision() raises after this was set
            str(matmul.allow_bf16_reduced_precision_reduction),
            str(matmul.allow_fp16_reduced_precision_reduction),
            str(torch.backends.cuda.preferred_blas_library()),
        ],
        "environment": sorted(
            f"{k}={v}" for k, v in os.environ.items() if k.startswith(VARIABLES) and "CACHE" not in k
        ),
    }


def _classes(model: Any) -> list[str]:
    return [f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()]


def _plain(model: Any) -> bool:
    """Whether torch and transformers alone define what the model computes: no code of a user's in between."""
    if torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks:
        return False
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if "forward" in vars(module) or any(getattr(h, "__module__", None) != TRANSFORMERS_HOOKS for h in hooks):
            return False
        if not str(getattr(type(module).forward, "__module__", None)).startswith(LIBRARIES):
            return False
    return all(name.startswith(LIBRARIES) for name in _classes(model))


def kept() -> list[Path]:
    """The files of all verdicts."""
    try:
        return sorted(folder().glob("*.json"))
    except (CacheUnavailable, OSError):
        return []


def forget() -> None:
    """Delete all verdicts: every model is checked again at its next start."""
    for path in kept():
        with contextlib.suppress(OSError):
            path.unlink()


def read(path: Path | None) -> Any:
    """The verdict; None if there is none."""
    if path is None:
        return None
    try:
        return read_json(path)
    except (OSError, CorruptCheckpoint):
        return None


def write(path: Path | None, verdict: Any) -> None:
    """Keep the verdict, if there is a file for it."""
    if path is not None:
        with contextlib.suppress(OSError):  # a cache folder that cannot be written: the next start checks again
            write_json(path, verdict)


def _path(target: Target, about: dict[str, str]) -> Path | None:
    """The file of a verdict; None for a model whose files are not known."""
    files = _files(target)
    return None if files is None else file_for(about | _key(target, files))


def file_for(key: dict[str, Any]) -> Path | None:
    """The file of a verdict that depends on this; None where there is no cache folder."""
    try:
        return folder() / f"{_digest(key)}.json"
    except CacheUnavailable:
        return None


def _key(target: Target, files: list[Any]) -> dict[str, Any]:
    """Everything that the verdict depends on."""
    gpu = target.device.type == "cuda"
    return {
        "versions": versions() | {"redrafter": __version__},
        "code": _code(),
        "device": torch.cuda.get_device_name(target.device)
        if gpu
        else [target.device.type, platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "dtype": str(target.dtype),
        "attention": target.config._attn_implementation,
        "config": target.config.to_json_string(use_diff=False),
        "files": files,
    }


def _files(target: Target) -> list[Any] | None:
    """Name, size and modification time of the model's files."""
    source = target.model.name_or_path
    if not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, "config.json", revision=getattr(target.config, "_commit_hash", None))
        if not isinstance(found, str):
            return None
        source = Path(found).parent
    if (Path(source) / "adapter_config.json").exists():  # the base model is elsewhere
        return None
    found = sorted(p for p in Path(source).iterdir() if p.is_file() and p.name != MANIFEST)
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in found]


def _code() -> str:
    package = Path(__file__).parents[1]
    sources = sorted(p for name in CODE for p in (package / name).rglob("*.py"))
    return _digest([[str(p.relative_to(package)), p.read_text()] for p in sources])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
