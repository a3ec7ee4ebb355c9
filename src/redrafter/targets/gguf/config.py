"""From a GGUF file's metadata to a transformers configuration of the same model."""

from typing import Any

from redrafter.errors import UnsupportedTarget
from redrafter.targets.attention import FULL, SLIDING
from redrafter.targets.gguf.file import GGUFFile

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""Architectures that redrafter reads, with their model types in transformers. Mistral's files say llama."""
GEMMA_LOCAL_THETA, GEMMA_PATTERN, GEMMA_27B_LAYERS = 10_000.0, 6, 62
"""Constants of Gemma 3 that its files leave out."""


def config_of(file: GGUFFile) -> Any:
    """The configuration of the model in a file."""
    from transformers import AutoConfig

    found = _Fields(file)
    model_type = ARCHITECTURES[found.architecture]
    heads = found.number("attention.head_count")
    hidden = found.number("embedding_length")
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    values: dict[str, Any] = {
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": found.number("feed_forward_length"),
        "num_hidden_layers": found.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.number("attention.head_count_kv", heads),
        "head_dim": found.number("attention.key_length", hidden // heads),
        "max_position_embeddings": found.number("context_length"),
        "rms_norm_eps": found.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(t for t in eos if isinstance(t, int))) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    rotation = _rotation(found)
    if model_type == "gemma3_text":
        divided = values["num_hidden_layers"] == GEMMA_27B_LAYERS
        values |= {
            "sliding_window": found.number("attention.sliding_window"),
            "sliding_window_pattern": GEMMA_PATTERN,
            "query_pre_attn_scalar": hidden // heads if divided else values["head_dim"],
            "rope_parameters": {FULL: rotation, SLIDING: {"rope_type": "default", "rope_theta": GEMMA_LOCAL_THETA}},
        }
    else:
        values["rope_parameters"] = rotation
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # what transformers checks in its configurations
        reason = str(error).strip().splitlines()[0]
        raise file.corrupt(f"its metadata describe no model ({reason})") from error


def _rotation(found: "_Fields") -> dict[str, Any]:
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": found.real("rope.freq_base", 10_000.0)}
    kind = found.values.get(f"{found.architecture}.rope.scaling.type", "none")
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

    def _get(self, name: str, default: Any) -> Any:
        found = self.values.get(f"{self.architecture}.{name}", default)
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise self.file.corrupt(f"{self.architecture}.{name} is {found!r}")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        return int(self._get(name, default))

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, default))
