"""Apple's drafter folder (ml-recurrent-drafter): read and write.

Differences to ours: the first state is zero, and the joint vector is [h, s] where ours is [s, h].
With an input projection only its columns change places; without one the whole residual stream of
the blocks does, in and out.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.drafters import RecurrentConfig, RecurrentNet, checkpoint, files
from redrafter.errors import ConfigError, CorruptCheckpoint

MODEL_TYPE = "recurrent_drafting_drafter"


def read(folder: Path) -> RecurrentNet:
    config = files.read_config(folder)
    if config.get("model_type") != MODEL_TYPE:
        raise CorruptCheckpoint(f"{folder} is not an Apple drafter: model_type is {shown(config.get('model_type'))}")
    numbers = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers")
    vocab_size, hidden, exit_size, blocks = (files.read_number(config, name, folder) for name in numbers)
    if not isinstance(config.get("rnn"), bool):
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: rnn must be true or false")
    try:
        shape = RecurrentConfig(
            vocab_size=vocab_size,
            context_size=hidden,
            embedding_size=hidden,
            state_size=hidden,
            exit_size=exit_size,
            blocks=blocks,
            cell="rnn" if config["rnn"] else "none",
            first_state="zero",
        )
    except ConfigError as error:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE} does not describe a drafter: {error}") from error
    tensors = files.read_tensors(folder)
    net = checkpoint.network(shape, tensors, folder)
    assert isinstance(net, RecurrentNet)
    foreign = {apple: own for own, apple in _names(net).items()}
    renamed = {foreign.get(name, name): tensor for name, tensor in tensors.items()}
    checkpoint.load_weights(net, _swap(renamed, hidden), folder)
    return net


def write(folder: Path, net: RecurrentNet, overwrite: bool = False) -> None:
    """Refused for what their format has no place for."""
    config = net.config
    hidden = config.context_size
    for ok, what in (
        (config.first_state == "zero", f"a first state from {config.first_state!r}"),
        (config.cell != "gated", "a gated cell"),
        (config.head == "own", "a tied head"),
        (not config.normed, "scaling to unit size"),
        (not config.memory_heads, "a memory"),
        (config.draft_vocab_size is None, "a draft vocabulary"),
        (config.layers == (-1,), "a context from several layers"),
        (config.state_size == config.embedding_size == hidden, "state, embedding and context of different sizes"),
    ):
        if not ok:
            raise ConfigError(f"Apple's format has no place for {what}")
    names = _names(net)
    tensors = {names[own]: t for own, t in _swap(net.state_dict(), hidden).items()}
    described: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "exit_dim": config.exit_size,
        "num_draft_layers": config.blocks,
        "rnn": config.cell == "rnn",
    }
    files.write_files(folder, described, tensors, overwrite)


def _names(net: RecurrentNet) -> dict[str, str]:
    """Our parameter name -> theirs."""
    names = {"head.weight": f"lm_head.{net.config.blocks}.weight"}
    for i in range(net.config.blocks):
        for part in ("weight", "bias"):
            names[f"blocks.{i}.{part}"] = f"lm_head.{i}.linear.{part}"
    names |= {"cell_u.weight": "rnn_u.weight", "cell_u.bias": "rnn_u.bias", "cell_w.weight": "rnn_w.weight"}
    return names | {"input_proj.weight": "input_proj.weight", "input_proj.bias": "input_proj.bias"}


def _swap(tensors: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Exchange the two halves of every axis that is the joint vector; its own inverse."""
    projected = "input_proj.weight" in tensors

    def halves(x: Tensor, dim: int) -> Tensor:
        return torch.roll(x, hidden, dims=dim) if x.shape[dim : dim + 1] == (2 * hidden,) else x

    swapped = {}
    for name, tensor in tensors.items():
        if name == "input_proj.weight" or (name == "head.weight" and not projected):
            tensor = halves(tensor, 1)
        elif name.startswith("blocks.") and not projected:
            tensor = halves(halves(tensor, 0), 1) if name.endswith("weight") else halves(tensor, 0)
        swapped[name] = tensor
    return swapped
