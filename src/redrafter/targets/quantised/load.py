"""Loads a quantised checkpoint, or rounds a model's weights at load: each tensor is dequantised when it is needed."""

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.bounds import shown
from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, UnsupportedTarget, first_line
from redrafter.targets.budget import folder_budget
from redrafter.targets.quantised import compressed_tensors, fine_fp8, grouped
from redrafter.targets.quantised.files import FLOATS, Stored, WeightFiles
from redrafter.targets.quantised.linear import RoundedLinear
from redrafter.targets.quantised.nearest import Scheme, plan
from redrafter.targets.quantised.stored import StoredLayer, refuse, value

log = logging.getLogger(__name__)

Read = Callable[[Mapping[str, Any], Mapping[str, Stored]], list[StoredLayer]]
FORMATS: dict[str, Read] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fine_fp8.read,
    "awq": grouped.read_awq,
    "gptq": grouped.read_gptq,
}
"""By the `quant_method` of a checkpoint's configuration."""
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
"""The files of a repository that a model needs."""


class Dequantised:
    """Stands for a weight in a state dict; transformers reads it by an index, when its place is ready."""

    def __init__(self, layer: StoredLayer, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype

    def __getitem__(self, _: Any) -> Tensor:
        return self.layer.dequantise(self.dtype)


class Plain:
    """The same for a tensor that is not quantised."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def __getitem__(self, _: Any) -> Tensor:
        return self.stored.read()


def quantisation(config: Any) -> Mapping[str, Any] | None:
    """What a configuration says of quantised weights; None if nothing."""
    given = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if given is not None and not isinstance(given, Mapping):
        raise CorruptCheckpoint(f"its quantization_config is {shown(given)}, no object")
    return given


def takes(config: Any, scheme: Scheme | None, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether `load_module` is to load this model. A user's own quantization_config goes to transformers."""
    if "quantization_config" in model_kwargs:
        if scheme is not None:
            raise ConfigError(f"dtype {scheme} and quantization_config are two ways to quantise: leave one out")
        return False
    return scheme is not None or quantisation(config) is not None


def load_module(
    source: str,
    config: Any,
    dtype: torch.dtype,
    scheme: Scheme | None,
    where: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
) -> Any:
    """`where` are the keywords that locate files, `model_kwargs` the others of `from_pretrained`."""
    given = quantisation(config)
    if scheme is not None and given is not None:
        raise ConfigError(f"{source!r} is quantised already; leave dtype {scheme} out")
    method = None if given is None else value(given, "quant_method", str, "compressed-tensors")
    if method is not None and method not in FORMATS:
        raise UnsupportedTarget(
            f"{refuse(shown(method))}, or give load a quantization_config of transformers for its own layers"
        )
    folder = local_folder(source, where)
    config = copy.deepcopy(config)
    for name in ("quantization_config", "compression_config"):
        with contextlib.suppress(AttributeError):
            delattr(config, name)
    tensors = WeightFiles(folder)
    tree = empty_model(config, folder, bool(where.get("trust_remote_code")))
    if scheme is None:
        stored = FORMATS[str(method)](given or {}, tensors)
        what = f"{method} layers"
    else:
        planned = plan(scheme, tree, tensors)
        stored = [planned.layer(name, tensors[f"{name}.weight"]) for name in sorted(planned.matrices)]
        config.rounded_to = scheme  # kept verdicts and profiles must not be those of the model as it is
        what = f"layers rounded to {scheme} in groups of {planned.size}"
    state = _state(tree, tensors, stored, dtype)
    _check_rounding(tree, stored)
    log.info("%s: %d %s, dequantised to %s in memory", source, len(stored), what, str(dtype).removeprefix("torch."))
    module, info = type(tree).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **model_kwargs
    )
    if info["missing_keys"]:
        raise CorruptCheckpoint(f"its files have no {min(info['missing_keys'])}; copy it again")
    module.name_or_path = module.config._name_or_path = source
    _use_generation_config(module, folder)
    for layer in stored:
        if layer.rounding is not None:
            linear = module.get_submodule(layer.name)
            scale = None if layer.input_scale is None else layer.input_scale.read().to(linear.weight.device)
            module.set_submodule(layer.name, RoundedLinear(linear, layer.rounding, scale))
    return module


def local_folder(source: str, where: Mapping[str, Any]) -> Path:
    """The folder with a model's files, downloaded first if it is an id."""
    if not Path(source).exists():
        from huggingface_hub import snapshot_download

        known = ("revision", "token", "cache_dir", "local_files_only", "force_download")
        options = {name: where[name] for name in known if name in where}
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise ModelNotFound(f"no model folder {source}")  # not a Hub id: do not ask the network
        try:
            source = snapshot_download(source, allow_patterns=PATTERNS, **options)
        except Exception as error:
            raise ModelNotFound(f"neither a folder here nor an id that can be reached ({first_line(error)})") from error
    return Path(source) / str(where.get("subfolder", ""))


def empty_model(config: Any, folder: Path, trust_remote_code: bool = False) -> Any:
    """The model without memory for its weights: names, shapes and kinds of its modules."""
    from transformers import AutoModelForCausalLM

    from redrafter.targets.vision_language import model_class

    if model_class(config) is not AutoModelForCausalLM:
        raise UnsupportedTarget(
            "quantised models that also read images are not read; use the model in 16 bits, or one for text alone"
        )
    with torch.device("meta"), folder_budget(folder):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _state(
    tree: Any, tensors: Mapping[str, Stored], layers: list[StoredLayer], dtype: torch.dtype
) -> dict[str, Dequantised | Plain]:
    """The state dict for transformers, and a check of what its tensors are, before any is read."""
    shapes = {name: tuple(parameter.shape) for name, parameter in tree.named_parameters()}
    state: dict[str, Dequantised | Plain] = {}
    quantised = {layer.name for layer in layers}
    for layer in layers:
        name = f"{layer.name}.weight"
        if shapes.get(name, layer.shape) != layer.shape:
            raise CorruptCheckpoint(f"{shown(name)} has the shape {layer.shape}, and its model {shapes[name]}")
        state[name] = Dequantised(layer, dtype)
    for name, stored in tensors.items():
        layer_name, _, end = name.rpartition(".")
        if layer_name in quantised and end != "bias":  # one of its parts
            continue
        if name in shapes and stored.dtype not in FLOATS:
            raise stored.wrong(f"has the type {stored.dtype}, and its configuration does not say how it is quantised")
        if shapes.get(name, stored.shape) != stored.shape:
            raise CorruptCheckpoint(f"{shown(name)} has the shape {stored.shape}, and its model {shapes[name]}")
        state[name] = Plain(stored)
    return state


def _check_rounding(tree: Any, layers: list[StoredLayer]) -> None:
    """Layers that transformers joins or names in another way cannot round what they receive."""
    for layer in layers:
        if layer.rounding is not None:
            try:
                module = tree.get_submodule(layer.name)
            except AttributeError:
                module = None
            if type(module) is not nn.Linear:
                raise UnsupportedTarget(
                    f"the layer {shown(layer.name)} rounds its inputs to {layer.rounding.to}, and the model has no "
                    "linear layer of this name; use a copy that rounds weights alone"
                )


def _use_generation_config(module: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(folder)
