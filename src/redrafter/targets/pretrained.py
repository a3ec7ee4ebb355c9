"""Models that transformers runs, checked: those that a name or a folder loads, and those of a user."""

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, UnsupportedTarget, first_line
from redrafter.targets.attention import AttentionPlan
from redrafter.targets.budget import folder_budget
from redrafter.targets.cpu import packed_load
from redrafter.targets.cpu.passes import install_cpu_forwards
from redrafter.targets.default import NAME, default_model
from redrafter.targets.gguf.file import GGUFFile, is_gguf
from redrafter.targets.gguf.tokenizer import tokenizer_of
from redrafter.targets.quantised import load as quantised
from redrafter.targets.quantised.nearest import Scheme
from redrafter.targets.selfcheck import check, check_with_fallback
from redrafter.targets.target import Target
from redrafter.targets.verdicts import check_once, install_cpu_forwards_once

log = logging.getLogger(__name__)

HUB_KWARGS = ("revision", "subfolder", "token", "trust_remote_code", "cache_dir", "local_files_only", "force_download")
"""Keywords of `from_pretrained` that locate files. They go to the config's and tokenizer's loading too."""

NO_CODE = {"trust_remote_code": False}
"""Without this, transformers asks on the terminal whether to run a folder's Python code (`auto_map`)."""

_checked: WeakKeyDictionary[Any, tuple[str, torch.dtype]] = WeakKeyDictionary()
"""Users' models that passed the self-check, with the attention implementation and dtype they had."""


def from_user(model: Any, tokenizer: Any) -> Target:
    """A loaded model of a user, put into eval mode. It is checked once for each attention implementation and dtype."""
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


def from_name(
    model: str | Path | None,
    tokenizer: Any,
    dtype: torch.dtype,
    device: str,
    model_kwargs: dict[str, Any],
    scheme: Scheme | None = None,
) -> Target:
    """A model that transformers loads, checked and with faster forwards on a CPU; the default model if left out.

    scheme: how its weights are rounded; None leaves them as they are.
    """
    target = _load(model, tokenizer, dtype, device, model_kwargs, scheme)
    if model_kwargs:  # these may change the model in ways that the key of a kept verdict does not cover
        check_with_fallback(target)
        install_cpu_forwards(target)
    else:
        check_once(target, check_with_fallback)
        install_cpu_forwards_once(target)
    return target


def _load(
    model: str | Path | None,
    tokenizer: Any,
    dtype: torch.dtype,
    device: str,
    model_kwargs: dict[str, Any],
    scheme: Scheme | None,
) -> Target:
    source = str(default_model() if model is None else model)
    if is_gguf(model):
        if scheme is not None:
            raise ConfigError(f"dtype {scheme} is not for GGUF files, whose weights are rounded already; leave it out")
        module = packed_load.dequantised(Path(source), dtype).to(device)
        return Target(module, tokenizer or tokenizer_of(GGUFFile(source)), name=Path(source).stem)
    local = Path(source).exists()
    if local and not (Path(source) / model_kwargs.get("subfolder", "") / "config.json").exists():
        raise ModelNotFound(f"{source} is no model folder: it has no config.json")
    if not local and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelNotFound(f"no model folder {source}")  # not a Hub id: do not ask the network
    module, tokenizer = load_parts(source, dtype, tokenizer, model_kwargs, scheme)
    if "device_map" not in model_kwargs:
        module = module.to(device)
    return Target(module, tokenizer, name=name_of(model, source))


def load_parts(
    source: str, dtype: torch.dtype, tokenizer: Any, model_kwargs: dict[str, Any], scheme: Scheme | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer with transformers; every error becomes one line."""
    from transformers import AutoTokenizer

    module = load_module(source, dtype, model_kwargs, scheme)
    if tokenizer is None:
        where = NO_CODE | {k: v for k, v in model_kwargs.items() if k in HUB_KWARGS}
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
        except Exception as error:  # token ids in and out still work; asking for text says what is missing
            log.info("%s has no tokenizer that loads (%s)", source, first_line(error))
    return module, tokenizer


def load_module(source: str, dtype: torch.dtype, model_kwargs: dict[str, Any], scheme: Scheme | None = None) -> Any:
    from transformers import AutoConfig

    from redrafter.targets.vision_language import model_class

    model_kwargs = NO_CODE | model_kwargs
    where = {k: v for k, v in model_kwargs.items() if k in HUB_KWARGS}
    folder = Path(source) / str(model_kwargs.get("subfolder", ""))
    try:
        budget = folder_budget(folder) if folder.is_dir() else contextlib.nullcontext()
        config = AutoConfig.from_pretrained(source, **where)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"cannot load {source!r}: {error}") from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source!r} brings Python code of its own, which loading it would run: give load the option "
                "trust_remote_code=True if you trust this code"
            ) from error
        raise ModelNotFound(
            f"no model {source!r}: it is neither a folder here nor a Hugging Face id that can be reached "
            f"({first_line(error)})"
        ) from error
    AttentionPlan(config.get_text_config())  # refuses kinds of layers before any weight is read
    loader = model_class(config)
    try:
        if quantised.takes(config, scheme, model_kwargs):
            others = {k: v for k, v in model_kwargs.items() if k not in HUB_KWARGS}
            return quantised.load_module(source, config, dtype, scheme, where, others).eval()
        with budget:
            module = loader.from_pretrained(source, dtype=dtype, **model_kwargs)
    except (ConfigError, ModelNotFound):
        raise
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {error}") from error
    except UnsupportedTarget as error:
        raise UnsupportedTarget(f"cannot load {source!r}: {error}") from error
    except TypeError as error:
        unknown = [k for k in model_kwargs if f"'{k}'" in str(error)]
        if not unknown:
            raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {first_line(error)}") from error
        raise ConfigError(f"load takes no {unknown[0]!r}, and neither does the model") from error
    except Exception as error:
        raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {first_line(error)}") from error
    return module.eval()


def name_of(model: str | Path | None, source: str) -> str:
    return NAME if model is None else Path(source).name if Path(source).exists() else source
