"""From a GGUF file's metadata to the configuration of the same model, in transformers' words.

Decoding needs the words alone. Importing a configuration class of transformers takes seconds, so
`transformers_config` makes one where transformers itself runs the model or scales its rotary embedding.
"""

import math
from types import SimpleNamespace
from typing import Any

from redrafter.errors import UnsupportedTarget
from redrafter.targets.attention import FULL, SLIDING
from redrafter.targets.gguf.file import GGUFFile

ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "granite", "phi3", "smollm3")},
    "gemma3": "gemma3_text",
}
"""Architectures that redrafter reads, with their model types in transformers. Mistral's files say llama."""
DIVIDED = ("llama", "gemma3_text")
"""Model types whose hidden size must be a multiple of the number of heads, as in transformers."""
GEMMA_LOCAL_THETA, GEMMA_PATTERN, GEMMA_27B_LAYERS = 10_000.0, 6, 62
"""Constants of Gemma 3 that its files leave out."""
KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
"""Metadata that redrafter knows of every architecture."""
OWN_KEYS = {
    "gemma3": ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    "granite": ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    "phi3": ("attention.sliding_window",),
}
"""Metadata that redrafter knows of one architecture."""
SMOLLM3_PATTERN = 4
"""Every so many layers of SmolLM3 have no rotary embedding; its files leave that out."""


def config_of(file: GGUFFile) -> SimpleNamespace:
    """The configuration of the model in a file."""
    found = _Fields(file)
    found.check_keys()
    model_type = ARCHITECTURES[found.architecture]
    heads = found.number("attention.head_count")
    hidden = found.number("embedding_length")
    rows = _rows(file, "token_embd.weight")
    bos, eos, eot, pad = (_token(file, name, rows) for name in ("bos", "eos", "eot", "padding"))
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": found.number("feed_forward_length"),
        "num_hidden_layers": found.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.number("attention.head_count_kv", heads),
        "head_dim": found.number("attention.key_length", hidden // heads),
        "max_position_embeddings": found.number("context_length"),
        "rms_norm_eps": found.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": bos,
        "eos_token_id": list(dict.fromkeys(t for t in (eos, eot) if t is not None)) or None,
        "pad_token_id": pad,
    }
    if model_type == "llama":
        values["attention_bias"] = any(name.endswith(".bias") for name in file.tensors)
    _check_sizes(found, values)
    rotation = _rotation(found)
    if model_type == "gemma3_text":
        layers = values["num_hidden_layers"]
        divided = layers == GEMMA_27B_LAYERS
        values |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": found.number("attention.sliding_window"),
            "layer_types": [SLIDING if (i + 1) % GEMMA_PATTERN else FULL for i in range(layers)],
            "query_pre_attn_scalar": hidden // heads if divided else values["head_dim"],
            "rope_parameters": {
                FULL: rotation,
                SLIDING: {"rope_type": "default", "rope_theta": found.real("rope.freq_base_swa", GEMMA_LOCAL_THETA)},
            },
        }
    else:
        values |= {"hidden_act": "silu", "rope_parameters": rotation}
    values |= _own_values(found, values)
    return SimpleNamespace(**values)


def _own_values(found: "_Fields", values: dict[str, Any]) -> dict[str, Any]:
    """What one architecture's configuration has beside the others'."""
    if values["model_type"] == "granite":
        return {
            "attention_multiplier": found.real("attention.scale", values["head_dim"] ** -0.5),
            "embedding_multiplier": found.real("embedding_scale", 1.0),
            "residual_multiplier": found.real("residual_scale", 1.0),
            "logits_scaling": found.real("logit_scale", 1.0),
        }
    if values["model_type"] == "smollm3":
        return {"no_rope_layers": [int(i % SMOLLM3_PATTERN != 0) for i in range(1, values["num_hidden_layers"] + 1)]}
    if values["model_type"] == "phi3":
        # llama.cpp ignores the window, transformers does not: only a window that hides nothing is clear.
        if found.values.get("phi3.attention.sliding_window") not in (None, 0):
            least = values["max_position_embeddings"]
            if found.number("attention.sliding_window") < least:
                raise found.unsupported("attention.sliding_window", f"none, or the whole context of {least}")
        return {"sliding_window": None}
    return {}


def transformers_config(config: SimpleNamespace, file: GGUFFile) -> Any:
    """The same configuration as a class of transformers."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**vars(config))
    except Exception as error:  # what transformers checks in its configurations
        reason = str(error).strip().splitlines()[0]
        raise file.corrupt(f"its metadata describe no model ({reason})") from error


def _check_sizes(found: "_Fields", values: dict[str, Any]) -> None:
    """Refuse sizes that contradict each other or the file."""
    heads, kv_heads, size = (values[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden = values["hidden_size"]
    if values["model_type"] in DIVIDED and hidden % heads:
        raise found.file.corrupt(f"{heads} heads cannot share a hidden size of {hidden}")
    if heads % kv_heads:
        raise found.file.corrupt(f"{heads} heads cannot share {kv_heads} key heads")
    if values["num_hidden_layers"] > len(found.file.tensors):
        raise found.file.corrupt(
            f"it claims {values['num_hidden_layers']} layers and has {len(found.file.tensors)} tensors"
        )
    for name in ("attention.value_length", "rope.dimension_count"):
        if found.number(name, size) != size:
            raise found.unsupported(name, f"a head size of {size} in all parts of a head")
    if found.number("attention.sliding_window_pattern", GEMMA_PATTERN) != GEMMA_PATTERN:
        raise found.unsupported("attention.sliding_window_pattern", f"a pattern of {GEMMA_PATTERN} layers")


def _token(file: GGUFFile, name: str, rows: int) -> int | None:
    """A special token's id. A number beyond the vocabulary stands for no token."""
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < rows else None


def _rotation(found: "_Fields") -> dict[str, Any]:
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": found.real("rope.freq_base", 10_000.0)}
    kind = found.values.get(f"{found.architecture}.rope.scaling.type", "none")
    if kind == "none" and found.real("rope.scaling.factor", 1.0) != 1.0:
        raise found.unsupported("rope.scaling.factor", "a rope.scaling.type (linear or yarn) beside a factor")
    if kind in ("linear", "yarn"):
        rotation |= {"rope_type": kind, "factor": found.real("rope.scaling.factor")}
        if kind == "yarn":
            rotation["original_max_position_embeddings"] = found.number("rope.scaling.original_context_length")
    elif kind != "none":
        raise UnsupportedTarget(f"{found.file.path} scales its rotary embedding by {kind!r}; use linear, yarn or none")
    return rotation


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise file.corrupt(f"it has no tensor {name}")
    return file.tensors[name].shape[0]


class _Fields:
    """Metadata of the file's architecture, by name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.values = file, file.metadata
        self.architecture = str(self.values.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedTarget(
                f"{file.path} has the architecture {self.architecture!r}; redrafter reads {', '.join(ARCHITECTURES)}"
            )

    def unsupported(self, name: str, wanted: str) -> UnsupportedTarget:
        key = f"{self.architecture}.{name}"
        return UnsupportedTarget(f"{self.file.path} has {key} = {self.values.get(key)!r}; redrafter needs {wanted}")

    def check_keys(self) -> None:
        """Refuse metadata that redrafter does not know, since it may change the arithmetic."""
        known = {*KEYS, *OWN_KEYS.get(self.architecture, ())}
        for key, value in self.values.items():
            own = key.removeprefix(f"{self.architecture}.")
            if own == key or own in known or (own in ("expert_count", "expert_used_count") and value == 0):
                continue
            raise UnsupportedTarget(
                f"{self.file.path} has {key} = {str(value)[:40]}, which redrafter does not know and which may change "
                "the model; use another file"
            )

    def _get(self, name: str, default: Any) -> Any:
        found = self.values.get(f"{self.architecture}.{name}", default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise self.file.corrupt(f"{self.architecture}.{name} is {str(found)[:40]}")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        found = self._get(name, default)
        if found != int(found) or found >= 2**31:
            raise self.file.corrupt(f"{self.architecture}.{name} is {found}")
        return int(found)

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, default))
