"""A draft model for speech: a few of the target's own decoder layers on the output of the target's encoder.

It differs from Distil-Whisper in two ways. The encoder and the embeddings are the target's own tensors, so the encoder
runs once per clip. And it guesses only among the first token ids: these are the most common ones (a byte-pair
vocabulary is numbered in the order of its merges), and the head is most of a small decoder's work.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redrafter.drafters import checkpoint, files, int8
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.targets.speech import SpeechTarget, install_cpu_linears

MODEL_TYPE = "redrafter_speech"


def shorten(target: SpeechTarget, layers: Sequence[int], guessable: int) -> SpeechTarget:
    """A draft model with copies of these decoder layers and of the last norm. All other weights are the target's."""
    if not layers or not all(0 <= i < target.layer_count for i in layers):
        raise ConfigError(f"layers must be some of 0 to {target.layer_count - 1}, got {list(layers)}")
    if not 1 <= guessable <= target.vocab_size:
        raise ConfigError(f"guessable must be in 1..{target.vocab_size}, got {guessable}")
    whole = target.model
    config = copy.deepcopy(whole.config)
    config.decoder_layers = len(layers)
    with torch.device("meta"):
        model = type(whole)(config)
    theirs, decoder = whole.model.decoder, model.model.decoder
    model.model.encoder = whole.model.encoder
    decoder.embed_tokens, decoder.embed_positions = theirs.embed_tokens, theirs.embed_positions
    decoder.layers = nn.ModuleList(copy.deepcopy(theirs.layers[i]) for i in layers)
    for place, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = layer.encoder_attn.layer_idx = place
    decoder.layer_norm = copy.deepcopy(theirs.layer_norm)
    width = whole.proj_out.weight.shape[1]
    model.proj_out = nn.Linear(width, guessable, bias=False, device="meta")
    model.proj_out.weight = nn.Parameter(whole.proj_out.weight[:guessable].detach(), requires_grad=False)
    model.generation_config = whole.generation_config
    draft = SpeechTarget(model.eval(), target.tokenizer, name=f"{len(layers)} layers of {target.name}")
    install_cpu_linears(draft)
    return draft


def shares_encoder(draft: SpeechTarget, target: SpeechTarget) -> bool:
    """Whether the draft model uses the output of the target's encoder."""
    return draft.model.model.encoder is target.model.model.encoder


def trained_parts(draft: SpeechTarget) -> nn.ModuleDict:
    """The modules that are trained and stored."""
    decoder = draft.model.model.decoder
    return nn.ModuleDict({"layers": decoder.layers, "layer_norm": decoder.layer_norm})


def write(folder: Path, draft: SpeechTarget, target: SpeechTarget, overwrite: bool = False) -> None:
    """Write a checkpoint with int8 matrices: guesses hardly change, and the text does not depend on them."""
    config: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "target": checkpoint.identity(target),
        "layers": draft.layer_count,
        "guessable": draft.vocab_size,
    }
    files.write_files(folder, config, int8.pack(trained_parts(draft).state_dict()), overwrite)


def read(folder: Path, target: SpeechTarget) -> SpeechTarget:
    config = files.read_config(folder)
    layers, guessable = (files.read_number(config, name, folder) for name in ("layers", "guessable"))
    made_for = files.read_target(config, folder)
    checkpoint.compare(made_for, target, f"the drafter {folder}", checkpoint.OTHERWISE)
    if layers > target.layer_count:
        raise DrafterMismatch(f"the drafter {folder} has {layers} layers, its target {target.layer_count}")
    draft = shorten(target, range(layers), guessable)
    try:
        checkpoint.load_weights(trained_parts(draft), files.read_tensors(folder), folder)
    except CorruptCheckpoint as error:
        raise DrafterMismatch(f"the drafter does not fit {target.name}: {error}") from error
    return draft
