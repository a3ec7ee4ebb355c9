"""A recurrent network for the CPU's compiled beam search: quantised weights, one C++ call a draft.

Rounding changes some guesses and never the text. The weights take 4 bits without guessing worse, because the best
guesses are scored again with the vocabulary's floats.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.kernels.cpu.draft import DraftModel
from redrafter.kernels.cpu.packed import Memory, PackedMatrix, quantise
from redrafter.targets import TargetInfo
from redrafter.targets.cpu.packed_target import PackedEmbedding

TILE = 32
"""Sizes must be multiples of this."""


def compile_network(net: RecurrentNet, target: TargetInfo, vocabulary: Tensor) -> DraftModel | None:
    """The network beside a target with packed weights; None if the compiled search does not run such a network."""
    embedding = target.input_embedding
    if not isinstance(embedding, PackedEmbedding) or not compiles(net):
        return None
    assert net.input_proj is not None
    memory = Memory()

    def packed(weight: Tensor) -> PackedMatrix:
        return PackedMatrix(quantise(weight.detach().numpy(), 4), memory)

    state, context, joint = net.config.state_size, net.config.context_size, net.input_proj.weight
    weights = {
        "cell_u": net.cell_u.weight,
        "cell_w": net.cell_w.weight,
        "from_context": net.from_context.weight,
        "input_state": joint[:, :state],
        "input_context": joint[:, state : state + context],
        "head": net.head.weight,
        "vocabulary": vocabulary,
    }
    if net.memory is not None:
        weights |= {name: getattr(net.memory, name).weight for name in ("query", "key", "value")}
        weights["input_memory"] = joint[:, state + context :]
    blocks: list[Any] = list(net.blocks)
    return DraftModel(
        {name: packed(weight) for name, weight in weights.items()} | {"embedding": embedding.matrix},
        [packed(block.weight) for block in blocks],
        {"cell_bias": net.cell_u.bias, "context_bias": net.from_context.bias, "input_bias": net.input_proj.bias},
        [block.bias for block in blocks],
        vocabulary,
        net.token_ids,
        embedding.scale,
        None if net.memory is None else F.logsigmoid(net.memory.decay),
        len(net.config.layers),
    )


def compiles(net: RecurrentNet) -> bool:
    """Whether the compiled search runs such a network."""
    config = net.config
    part = config.context_size // len(config.layers)
    sizes = (config.state_size, config.exit_size, part, config.embedding_size, config.memory_size or 0)
    return (
        (config.cell, config.first_state, config.head, config.normed) == ("gated", "context", "tied", True)
        and net.input_proj is not None
        and all(size % TILE == 0 for size in sizes)
    )
