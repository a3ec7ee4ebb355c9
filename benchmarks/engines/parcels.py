"""Engines in parcels, for a machine without a network: Python 3.12, torch 2.11.0 for CUDA 13, one H200.

`build` downloads wheels, leaves out what is not used and writes folders p1, p2, … of at most 40 MB, where there is a
network. `unpack` makes a folder of packages of them. sglang_parcels.py and vllm_parcels.py say what an engine needs.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engines.strip import strip
from redrafter.errors import ConfigError

LARGEST = 40_000_000
"""Bytes of a parcel."""
ARCHITECTURE = 90
"""The H200's: code for other GPUs is not sent."""
GLIBC = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")


@dataclass(frozen=True)
class Cut:
    """A wheel of which only a part is sent."""

    requirement: str
    archives: tuple[tuple[str, str], ...]
    """(pattern, archive): a file goes to the archive of the first pattern found in its name; archive "": left out."""
    stripped: str = "^$"
    """Pattern of the libraries that lose their code for other GPUs."""
    sources: str = ""
    """Of those libraries, keep only code compiled from CUDA files whose names match this pattern."""

    @property
    def names(self) -> list[str]:
        return sorted({archive for _, archive in self.archives if archive})

    def archive_of(self, file: str) -> str:
        return next(archive for pattern, archive in self.archives if re.search(pattern, file))

    def write(self, wheel: Path, folder: Path) -> None:
        """Write the archives. Libraries are compressed by LZMA, which makes vLLM's attention a quarter of deflate's."""
        made = {name: zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) for name in self.names}
        with zipfile.ZipFile(wheel) as old:
            for file in (i.filename for i in old.infolist() if not i.is_dir()):
                if archive := self.archive_of(file):
                    data = old.read(file)
                    if re.search(self.stripped, file):
                        data = strip(data, ARCHITECTURE, self.sources)
                    method = zipfile.ZIP_LZMA if file.endswith(".so") else zipfile.ZIP_DEFLATED
                    made[archive].writestr(file, data, compress_type=method)
        for archive_file in made.values():
            archive_file.close()


@dataclass(frozen=True)
class Parcels:
    """What an engine needs on the machine."""

    requirements: Path
    """A file that lists the wheels that are sent whole."""
    cuts: tuple[Cut, ...]
    stubs: Mapping[str, str]
    """Files that stand for packages that the engine imports and this benchmark does not use."""
    compiled: str
    """Folder of Python files to compile at once rather than when the engine starts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine. `{folder}` is the folder of the parcels."""

    @property
    def count(self) -> int:
        """How many archives the parcels hold."""
        return len(self.requirements.read_text().split()) + sum(len(cut.names) for cut in self.cuts)

    def build(self, folder: Path) -> None:
        """Make folder/p1, folder/p2, …"""
        with tempfile.TemporaryDirectory() as scratch:
            whole, made = Path(scratch) / "whole", Path(scratch) / "made"
            made.mkdir()
            _download(made, "-r", str(self.requirements))
            for cut in self.cuts:
                _download(whole, cut.requirement)
                (wheel,) = whole.glob("*.whl")
                cut.write(wheel, made)
                wheel.unlink()
            sizes = {path.name: path.stat().st_size for path in made.iterdir()}
            for number, names in enumerate(packed(sizes, LARGEST), 1):
                part = folder / f"p{number}"
                part.mkdir(parents=True)
                for name in names:
                    shutil.move(made / name, part / name)
                print(f"{part}: {len(names)} archives, {sum(sizes[n] for n in names) / 1e6:.1f} MB", flush=True)

    def unpack(self, folder: Path) -> None:
        """Make folder/site from the parcels in folder/p1, folder/p2, …, once."""
        site, done = folder / "site", folder / "site" / ".done"
        if done.exists():
            return
        shutil.rmtree(site, ignore_errors=True)
        archives = sorted(path for kind in ("whl", "zip") for path in folder.glob(f"p[0-9]*/*.{kind}"))
        if len(archives) < self.count:
            raise ConfigError(f"{folder} has {len(archives)} archives of {self.count}; copy all of p1, p2, … there")
        site.mkdir(parents=True)
        for archive in archives:
            zipfile.ZipFile(archive).extractall(site)
        for name, text in self.stubs.items():
            path = folder / "stubs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        compileall.compile_dir(site / self.compiled, quiet=2, workers=0)
        done.touch()

    def environment(self, folder: Path, repository: Path) -> dict[str, str]:
        """The environment variables of an engine's process."""
        paths = [folder / "site", folder / "stubs", repository / "src", repository]
        (folder / "lib").mkdir(exist_ok=True)
        compiler = Path(
            shutil.which("nvcc", path=f"/usr/local/cuda/bin:{os.environ['PATH']}") or "/usr/local/cuda/bin/nvcc"
        )
        home = Path(os.environ.get("CUDA_HOME") or compiler.resolve().parents[1])
        if not (home / "lib64" / "libcudart.so").exists():  # SGLang links what it compiles with -lcudart
            found = [p for d in sys.path for p in Path(d).glob("nvidia/*/lib/libcudart.so.1[0-9]")]
            link = folder / "lib" / "libcudart.so"
            if found and not link.exists():
                link.symlink_to(found[0])
        return (
            dict(os.environ)
            | {
                "PYTHONPATH": ":".join(map(str, paths)),
                "PYTHONUNBUFFERED": "1",
                "CUDA_HOME": str(home),
                "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
                "LIBRARY_PATH": f"{folder / 'lib'}:{os.environ.get('LIBRARY_PATH', '')}",
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
                "no_proxy": "127.0.0.1,localhost",
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "USE_TF": "0",
                "USE_FLAX": "0",
            }
            | {name: value.format(folder=folder) for name, value in self.variables.items()}
        )


def packed(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Names in as few groups of at most `largest` bytes as placing the largest first gives.

    >>> packed({"a": 3, "b": 5, "c": 4, "d": 2}, 8)
    [['b', 'a'], ['c', 'd']]
    """
    groups: list[tuple[list[str], int]] = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size > largest:
            raise ConfigError(f"{name} has {size} bytes, a parcel at most {largest}; leave more of it out")
        at = next((i for i, (_, used) in enumerate(groups) if used + size <= largest), len(groups))
        names, before = groups[at] if at < len(groups) else ([], 0)
        groups[at : at + 1] = [([*names, name], before + size)]
    return [names for names, _ in groups]


def _download(folder: Path, *wanted: str) -> None:
    platforms = [f"manylinux_{g}_x86_64" for g in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    words = ["download", "-q", "--no-deps", "--python-version", "3.12", "--only-binary=:all:", "-d", str(folder)]
    for platform in platforms:
        words += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", *words, *wanted], check=True)
