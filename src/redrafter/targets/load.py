"""Load a target from a name, a folder, a GGUF file or a model."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redrafter.bounds import check_path, checked, shown
from redrafter.errors import ConfigError, first_line
from redrafter.targets.cpu import packed_load
from redrafter.targets.default import NAME, default_gguf, default_model
from redrafter.targets.gguf.file import is_gguf
from redrafter.targets.quantised.nearest import SCHEMES, Scheme
from redrafter.targets.target import Target

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
    if dtype in SCHEMES:  # of the weights too
        return parse_dtype(None, device)
    if dtype not in DTYPES:
        known = ", ".join([*DTYPES, *packed_load.BITS, *SCHEMES])
        raise ConfigError(f"unknown dtype {shown(dtype)}; use one of {known}")
    return DTYPES[dtype]


def _scheme(dtype: Any) -> Scheme | None:
    return next((scheme for scheme in SCHEMES if scheme == dtype), None)


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@checked
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
    quantise any other model of a known family; `stored` keeps its weights in bf16 or fp16 if they are. On any device,
    int4 and fp8 round the weights of any model, as `redrafter quantize` does.

    Further keywords (`device_map`, `quantization_config`, `revision`, ...) go to `from_pretrained`. A user's own
    model is put into eval mode; `Target.release` hands it back as it came.
    """
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"tokenizer must be a tokenizer of transformers, got {shown(tokenizer)}")
    if isinstance(model, str | Path):
        check_path("model", model)
    if model is None or isinstance(model, str | Path):
        packed = _packed(model, tokenizer, dtype, device, model_kwargs)
        if packed is not None:
            return packed
        from redrafter.targets import pretrained  # imports much of transformers, which packed weights do not need

        device = parse_device(device)
        kind = parse_dtype(dtype, device)
        return pretrained.from_name(model, tokenizer, kind, device, model_kwargs, _scheme(dtype))
    if dtype is not None or device is not None or model_kwargs:
        raise ConfigError("a loaded model keeps its dtype and device: give dtype, device and others with a name only")
    if isinstance(model, type) or not hasattr(model, "get_output_embeddings"):
        raise ConfigError(
            f"a model is a name, a folder, a GGUF file or a causal LM of transformers, not {shown(model)}"
        )
    from redrafter.targets import pretrained

    return pretrained.from_user(model, tokenizer)


def parse_device(device: str | None) -> str:
    """A device that exists here; by default a GPU if there is one."""
    if device is None:
        return best_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {shown(device)} here ({first_line(error)}); use cpu or leave it out") from error
    return device


def runs_packed(model: Any, dtype: str | torch.dtype | None, device: str | None, model_kwargs: dict[str, Any]) -> bool:
    """Whether the target will have packed weights: where they are asked for, or the default."""
    if not (model is None or isinstance(model, str | Path)):
        return False
    if is_gguf(model) and model_kwargs:
        raise ConfigError(f"a GGUF file takes no {next(iter(model_kwargs))!r}; leave it out")
    packs = isinstance(dtype, str) and dtype in packed_load.BITS
    if not packs and (dtype not in (None, "auto") or not (model is None or is_gguf(model))):
        return False
    fits = parse_device(device) == "cpu" and not model_kwargs and packed_load.available()  # may compile: ask last
    if packs and (not fits or is_gguf(model)):
        raise ConfigError(
            f"dtype {dtype} is for a Hugging Face model on a CPU where the compiled path runs (see redrafter "
            "doctor), and takes no other options; leave it out"
        )
    return fits


def _packed(
    model: str | Path | None,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | None,
    model_kwargs: dict[str, Any],
) -> Target | None:
    """The target with packed weights; None where transformers runs the model."""
    if not runs_packed(model, dtype, device, model_kwargs):
        return None
    if isinstance(dtype, str) and dtype in packed_load.BITS:
        from redrafter.targets import pretrained

        source = str(default_model() if model is None else model)
        module, tokenizer = pretrained.load_parts(source, torch.float32, tokenizer, {})
        bits = packed_load.BITS[dtype]
        if bits is None:
            again = partial(pretrained.load_module, source, torch.float32, {})
        else:
            log.info("the text is that of the %d-bit model", bits)
            again = partial(_refuse_module, dtype)
        return packed_load.from_module(module.eval(), tokenizer, pretrained.name_of(model, source), bits, again)
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
    from redrafter.targets import pretrained

    return pretrained.load_module(str(default_model()), torch.float32, {})
