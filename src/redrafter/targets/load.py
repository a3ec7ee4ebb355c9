"""Load a target from a name, a folder or a model, and check it."""

import logging
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, UnsupportedTarget
from redrafter.targets.cpu import packed_load
from redrafter.targets.cpu.passes import install_cpu_forwards
from redrafter.targets.default import NAME, default_gguf, default_model
from redrafter.targets.gguf.file import GGUFFile
from redrafter.targets.gguf.tokenizer import tokenizer_of
from redrafter.targets.selfcheck import check, check_with_fallback
from redrafter.targets.target import Target
from redrafter.targets.verdicts import check_once, install_cpu_forwards_once

log = logging.getLogger(__name__)

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    """A name or a torch dtype; by default bf16 on a GPU and fp32 on a CPU."""
    if dtype is None or dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in packed_load.BITS:  # of the weights; activations are in fp32
        return torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; use one of {', '.join([*DTYPES, *packed_load.BITS])}")
    return DTYPES[dtype]


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(
    model: Any = None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    **model_kwargs: Any,
) -> Target:
    """`model`: a Hugging Face id, a folder, a GGUF file, a loaded transformers model, or nothing for the default.

    On a CPU, without a dtype, the default model and GGUF files keep their own quantised weights. The dtypes q8 and q4
    quantise any other model of a known family; `stored` keeps its weights in bf16 or fp16 if they are.

    Further keywords (`device_map`, `quantization_config`, `revision`, ...) go to `from_pretrained`. A user's own
    model is put into eval mode; `Target.release` hands it back as it came.
    """
    if model is None or isinstance(model, str | Path):
        packed = _packed(model, tokenizer, dtype, device, model_kwargs)
        if packed is not None:
            return packed
        target = _from_pretrained(model, tokenizer, dtype, device, model_kwargs)
        if model_kwargs:  # these may change the model in ways that the key of a kept verdict does not cover
            check_with_fallback(target)
            install_cpu_forwards(target)
        else:
            check_once(target, check_with_fallback)
            install_cpu_forwards_once(target)
        return target
    if dtype is not None or device is not None or model_kwargs:
        raise ConfigError("a loaded model keeps its dtype and device: give dtype, device and others with a name only")
    target = Target(model, tokenizer)
    modes = [(module, module.training) for module in model.modules()]
    target.on_release(partial(_restore_modes, modes))
    model.eval()
    key = (target.config._attn_implementation, target.dtype)
    if _checked.get(model) != key:
        try:
            check(target)  # a user's model is never switched to another attention implementation
        except UnsupportedTarget:
            target.release()
            raise
        _checked[model] = key
    return target


def _restore_modes(modes: list[tuple[Any, bool]]) -> None:
    for module, training in modes:
        module.training = training


_checked: WeakKeyDictionary[Any, tuple[str, torch.dtype]] = WeakKeyDictionary()
"""Users' models that passed the self-check, with the attention implementation and dtype they had."""

HUB_KWARGS = ("revision", "subfolder", "token", "trust_remote_code", "cache_dir", "local_files_only", "force_download")
"""Keywords of `from_pretrained` that locate files. They go to the config's and tokenizer's loading too."""


def parse_device(device: str | None) -> str:
    """A device that exists here; by default a GPU if there is one."""
    if device is None:
        return best_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {device!r} here ({first_line(error)}); use cpu or leave it out") from error
    return device


def _packed(
    model: str | Path | None,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | None,
    model_kwargs: dict[str, Any],
) -> Target | None:
    """The target with packed weights, where it is asked for or the default; None where transformers runs the model."""
    if _is_gguf(model) and model_kwargs:
        raise ConfigError(f"a GGUF file takes no {next(iter(model_kwargs))!r}; leave it out")
    packs = isinstance(dtype, str) and dtype in packed_load.BITS
    if not packs and (dtype not in (None, "auto") or not (model is None or _is_gguf(model))):
        return None
    fits = parse_device(device) == "cpu" and not model_kwargs and packed_load.available()  # may compile: ask last
    if packs:
        if not fits or _is_gguf(model):
            raise ConfigError(
                f"dtype {dtype} is for a Hugging Face model on a CPU where the compiled path runs (see redrafter "
                "doctor), and takes no other options; leave it out"
            )
        source = str(default_model() if model is None else model)
        module, tokenizer = _load_parts(source, torch.float32, tokenizer, {})
        bits = packed_load.BITS[str(dtype)]
        if bits is None:
            again = partial(_load_module, source, torch.float32, {})
        else:
            log.info("the text is that of the %d-bit model", bits)
            again = partial(_refuse_module, str(dtype))
        return packed_load.from_module(module.eval(), tokenizer, _name(model, source), bits, again)
    if not fits:
        return None
    if model is None:
        found = default_gguf()
        return None if found is None else packed_load.from_gguf(found, tokenizer, NAME, _default_module)
    return packed_load.from_gguf(Path(model), tokenizer)


def _refuse_module(dtype: str) -> Any:
    """transformers' model has the unrounded weights, so its hidden states are not those of the decoded texts."""
    raise ConfigError(
        f"with dtype {dtype} the model's weights are rounded, and no drafter trains on them; use dtype fp32"
    )


def _default_module() -> Any:
    return _load_module(str(default_model()), torch.float32, {})


def _is_gguf(model: str | Path | None) -> bool:
    return model is not None and str(model).endswith(".gguf")


def _name(model: str | Path | None, source: str) -> str:
    return NAME if model is None else Path(source).name if Path(source).exists() else source


def _from_pretrained(
    model: str | Path | None,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | None,
    model_kwargs: dict[str, Any],
) -> Target:
    device = parse_device(device)
    wanted = parse_dtype(dtype, device)
    source = str(default_model() if model is None else model)
    if _is_gguf(model):
        module = packed_load.dequantised(Path(source), wanted).to(device)
        return Target(module, tokenizer or tokenizer_of(GGUFFile(source)), name=Path(source).stem)
    local = Path(source).exists()
    if local and not (Path(source) / model_kwargs.get("subfolder", "") / "config.json").exists():
        raise ModelNotFound(f"{source} is no model folder: it has no config.json")
    if not local and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelNotFound(f"no model folder {source}")  # not a Hub id: do not ask the network
    module, tokenizer = _load_parts(source, wanted, tokenizer, model_kwargs)
    if "device_map" not in model_kwargs:
        module = module.to(device)
    return Target(module, tokenizer, name=_name(model, source))


def _load_parts(source: str, dtype: torch.dtype, tokenizer: Any, model_kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Load model and tokenizer with transformers; every error becomes one line."""
    from transformers import AutoTokenizer

    module = _load_module(source, dtype, model_kwargs)
    if tokenizer is None:
        where = {k: v for k, v in model_kwargs.items() if k in HUB_KWARGS}
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
        except Exception as error:  # token ids in and out still work; asking for text says what is missing
            log.info("%s has no tokenizer that loads (%s)", source, first_line(error))
    return module, tokenizer


def _load_module(source: str, dtype: torch.dtype, model_kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    where = {k: v for k, v in model_kwargs.items() if k in HUB_KWARGS}
    try:
        AutoConfig.from_pretrained(source, **where)
    except Exception as error:
        raise ModelNotFound(
            f"no model {source!r}: it is neither a folder here nor a Hugging Face id that can be reached "
            f"({first_line(error)})"
        ) from error
    try:
        module = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **model_kwargs)
    except TypeError as error:
        unknown = [k for k in model_kwargs if f"'{k}'" in str(error)]
        if not unknown:
            raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {first_line(error)}") from error
        raise ConfigError(f"load takes no {unknown[0]!r}, and neither does the model") from error
    except Exception as error:
        raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {first_line(error)}") from error
    return module.eval()


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
