"""Writes a folder with a model's weights rounded, one file after another; a run that was stopped is taken up again."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from redrafter.bounds import check_path
from redrafter.errors import ConfigError, CorruptCheckpoint, RedrafterError, first_line
from redrafter.targets.quantised.files import INDEX, Stored, WeightFiles, shards, tensors_of
from redrafter.targets.quantised.load import empty_model, local_folder, quantisation
from redrafter.targets.quantised.nearest import Plan, Scheme, plan

Progress = Callable[[int, int], None]
"""Called with the number of weights that are done, and of all."""

CONFIG, STATE, PART = "config.json", ".redrafter-quantize.json", ".part"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of files with weights, which are not copied."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a run wrote."""

    layers: int
    size: int
    """Weights that share a scale: those of a group, or a block's rows and its columns."""
    bytes_before: int
    bytes_after: int


def quantise_folder(model: str, out: Path, scheme: Scheme, progress: Progress | None = None) -> Written:
    """Round a model's linear layers, and write it with all other files of its folder to `out`.

    One file of weights is in memory at a time. A file that is complete stays when the run is stopped.
    """
    check_path("model", model)
    try:
        folder = local_folder(model, {})
        tensors = WeightFiles(folder)
        planned = plan(scheme, _tree(folder), tensors)
    except RedrafterError as error:
        raise type(error)(f"cannot quantise {model!r}: {error}") from error
    if out.exists() and out.resolve() == folder.resolve():
        raise ConfigError(f"{out} is the model's own folder; choose another folder")
    _begin(out, tensors.files, scheme)
    total, done = sum(math.prod(each.shape) for each in tensors.values()), 0
    for file in tensors.files:
        made: dict[str, Tensor] = {}
        ready = (out / file.name).exists()
        for stored in (each for each in tensors.values() if each.file == file):
            if not ready:
                made |= _rounded(stored, planned)
            done += math.prod(stored.shape)
            if progress is not None:
                progress(done, total)
        if not ready:
            _write(out / file.name, made)
    _finish(out, folder, tensors.files, planned)
    before, after = (sum(each.stat().st_size for each in files) for files in (tensors.files, shards(out)))
    return Written(layers=len(planned.matrices), size=planned.size, bytes_before=before, bytes_after=after)


def _rounded(stored: Stored, planned: Plan) -> dict[str, Tensor]:
    """What the written file holds in place of a tensor, by name."""
    layer = stored.name.removesuffix(".weight")
    if layer not in planned.matrices:
        return {stored.name: stored.read()}
    return {f"{layer}.{end}": part for end, part in planned.quantised(stored.read()).items()}


def _tree(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise CorruptCheckpoint(f"its configuration cannot be read ({first_line(error)})") from error
    if quantisation(config) is not None:
        raise ConfigError("it is quantised already; give the model that it was made from")
    return empty_model(config, folder)


def _begin(out: Path, files: list[Path], scheme: Scheme) -> None:
    """Say in the folder what it will hold; refuse one that holds anything else."""
    about = {"scheme": scheme, "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]}
    state = out / STATE
    try:
        known = json.loads(state.read_text()) if state.exists() else None
    except ValueError:
        known = None
    if known == about:
        return
    if any(path.name != ".lock" for path in out.iterdir()) if out.is_dir() else out.exists():
        what = "an unfinished run with another model or scheme" if state.exists() else "other files"
        raise ConfigError(f"{out} holds {what}; choose another folder, or empty this one")
    out.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps(about))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_name(f".{path.name}{PART}")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    except SafetensorError as error:
        part.unlink(missing_ok=True)
        raise RedrafterError(
            f"cannot write {path} ({first_line(error)}); free space, then give the command again"
        ) from error
    part.replace(path)


def _finish(out: Path, folder: Path, files: list[Path], planned: Plan) -> None:
    """The index, the other files of the model, and last its configuration: only a whole folder has one."""
    for file in sorted(folder.iterdir()):
        weights = file.name.endswith(WEIGHTS) or file.name in (INDEX, CONFIG)
        if file.is_file() and not file.name.startswith(".") and not weights:
            shutil.copyfile(file, out / file.name)
    if (folder / INDEX).exists():
        names = {stored.name: file.name for file in files for stored in tensors_of(out / file.name)}
        size = sum((out / file.name).stat().st_size for file in files)
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=1) + "\n")
    config = json.loads((folder / CONFIG).read_text()) | {"quantization_config": planned.config()}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (out / STATE).unlink()
