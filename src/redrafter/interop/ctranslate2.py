"""CTranslate2's Whisper folder (`model.bin`, `config.json`, `tokenizer.json`) as a transformers Whisper.

The file: a version, the model's kind and revision, then for each variable its name, rank, sizes, data
type and bytes, then aliases (the output embedding is the input embedding). Queries, keys and values of
self-attention lie in one matrix, keys and values of cross-attention in another.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import CorruptCheckpoint, UnsupportedTarget

MODEL_FILE, TOKENIZER_FILE = "model.bin", "tokenizer.json"
VERSION, KIND = 6, "WhisperSpec"
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
"""By the number the file gives them."""
GELU = 3
"""CTranslate2's number for the activation of every Whisper."""

ENGLISH_ONLY = 51864
"""A larger vocabulary is that of the multilingual models."""
END, START, SILENT = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"

Variables = dict[str, Tensor]


class _Reader:
    """Walks through the bytes and knows when they end too early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        self.at = 0

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise CorruptCheckpoint(f"{self.path} ends in the middle of a variable: it is cut off, copy it again")
        self.at += count
        return memoryview(self.data)[self.at - count : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0])

    def text(self) -> str:
        return bytes(self.take(self.number("H"))).rstrip(b"\0").decode("utf-8", "replace")

    def variable(self) -> tuple[str, Tensor]:
        name = self.text()
        sizes = [self.number("I") for _ in range(self.number("B"))]
        kind, count = self.number("B"), self.number("I")
        if kind >= len(DTYPES) or count != math.prod(sizes) * DTYPES[kind].itemsize:
            raise CorruptCheckpoint(f"{self.path} says nonsense about the variable {name!r}")
        return name, torch.frombuffer(self.take(count), dtype=DTYPES[kind]).view(sizes)


def read_variables(path: Path) -> Variables:
    """All variables of a Whisper `model.bin`, aliases among them, in the types they have there."""
    file = _Reader(path)
    version = file.number("I")
    if version != VERSION:
        raise UnsupportedTarget(f"{path} is no CTranslate2 model of version {VERSION}: its first number is {version}")
    kind = file.text()
    if kind != KIND:
        raise UnsupportedTarget(f"{path} holds a model of the kind {kind!r}; only Whisper ({KIND}) can be read")
    file.number("I")  # revision of the kind
    variables = dict(file.variable() for _ in range(file.number("I")))
    for _ in range(file.number("I")):
        alias, name = file.text(), file.text()
        if name not in variables:
            raise CorruptCheckpoint(f"{path} calls {name!r} also {alias!r}, but has no such variable")
        variables[alias] = variables[name]
    return variables


def read(folder: Path) -> tuple[Any, Any]:
    """A folder -> transformers' WhisperForConditionalGeneration in fp32, and its tokenizer."""
    from transformers import WhisperForConditionalGeneration

    variables = read_variables(folder / MODEL_FILE)
    try:
        described = json.loads((folder / "config.json").read_text())
        tokenizer = _tokenizer(folder / TOKENIZER_FILE)
        config = _config(variables, tokenizer)
        weights = dict(_weights(variables, config))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise CorruptCheckpoint(f"{folder} does not describe a Whisper: {type(error).__name__} {error}") from error
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    try:
        missing, _ = model.load_state_dict(weights, assign=True, strict=False)
    except RuntimeError as error:
        raise CorruptCheckpoint(f"{folder} holds weights of wrong sizes: {str(error).splitlines()[-1]}") from error
    if set(missing) - {"proj_out.weight"}:
        raise CorruptCheckpoint(f"{folder / MODEL_FILE} lacks {sorted(missing)[0]}")
    model.tie_weights()
    generation = model.generation_config
    generation.suppress_tokens = described.get("suppress_ids", [])
    generation.begin_suppress_tokens = described.get("suppress_ids_begin", [])
    generation.no_timestamps_token_id = tokenizer.convert_tokens_to_ids(SILENT)
    generation.is_multilingual = config.vocab_size > ENGLISH_ONLY
    generation.lang_to_id = {tokenizer.convert_ids_to_tokens(i): i for i in described.get("lang_ids", [])}
    generation.task_to_id = {"transcribe": tokenizer.convert_tokens_to_ids("<|transcribe|>")}
    return model.eval(), tokenizer


def _tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.pad_token = END
    for token in (END, START, SILENT):
        if token not in tokenizer.get_vocab():
            raise ValueError(f"its tokenizer has no {token}")
    return tokenizer


def _config(variables: Variables, tokenizer: Any) -> Any:
    """Everything about the model's shape is in the shapes of its variables."""
    from transformers import WhisperConfig

    for name, value in (("activation", GELU), ("pre_norm", 1), ("scale_embeddings", 0)):
        if int(variables[f"decoder/{name}"]) != value:
            raise ValueError(f"decoder/{name} is {int(variables[f'decoder/{name}'])}, not {value}")
    vocab_size, width = variables["decoder/embeddings/weight"].shape
    end = tokenizer.eos_token_id
    return WhisperConfig(
        vocab_size=vocab_size,
        d_model=width,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        encoder_layers=_layers(variables, "encoder"),
        decoder_layers=_layers(variables, "decoder"),
        encoder_attention_heads=int(variables["encoder/num_heads"]),
        decoder_attention_heads=int(variables["decoder/num_heads"]),
        encoder_ffn_dim=variables["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=variables["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=variables["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=variables["decoder/position_encodings/encodings"].shape[0],
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(START),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def _layers(variables: Variables, side: str) -> int:
    return len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and name.count("/") > 2})


def _weights(variables: Variables, config: Any) -> Iterator[tuple[str, Tensor]]:
    """transformers' names with fp32 tensors."""

    def get(name: str) -> Tensor:
        tensor = variables[name]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is quantised; only models in fp32, fp16 or bf16 can be read")
        return tensor.float()

    def norm(theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{ours}.weight", get(f"{theirs}/gamma")
        yield f"{ours}.bias", get(f"{theirs}/beta")

    def linear(theirs: str, *ours: str) -> Iterator[tuple[str, Tensor]]:
        """One matrix over there, several over here, one above the other."""
        weights, biases = get(f"{theirs}/weight").chunk(len(ours)), get(f"{theirs}/bias").chunk(len(ours))
        for name, weight, bias in zip(ours, weights, biases, strict=True):
            yield f"{name}.weight", weight.contiguous()
            if not name.endswith("k_proj"):  # a bias of keys cancels in the softmax: Whisper has none
                yield f"{name}.bias", bias.contiguous()

    yield "model.decoder.embed_tokens.weight", get("decoder/embeddings/weight")
    for i in (1, 2):
        yield f"model.encoder.conv{i}.weight", get(f"encoder/conv{i}/weight")
        yield f"model.encoder.conv{i}.bias", get(f"encoder/conv{i}/bias")
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        yield f"model.{side}.embed_positions.weight", get(f"{side}/position_encodings/encodings")
        yield from norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for i in range(layers):
            theirs, ours = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            own = f"{ours}.self_attn"
            yield from norm(f"{theirs}/self_attention/layer_norm", f"{own}_layer_norm")
            yield from linear(f"{theirs}/self_attention/linear_0", *(f"{own}.{x}_proj" for x in "qkv"))
            yield from linear(f"{theirs}/self_attention/linear_1", f"{own}.out_proj")
            if side == "decoder":
                cross = f"{ours}.encoder_attn"
                yield from norm(f"{theirs}/attention/layer_norm", f"{cross}_layer_norm")
                yield from linear(f"{theirs}/attention/linear_0", f"{cross}.q_proj")
                yield from linear(f"{theirs}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                yield from linear(f"{theirs}/attention/linear_2", f"{cross}.out_proj")
            yield from norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            yield from linear(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            yield from linear(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
