"""What all drafters with a network of ours do when they are bound to a target."""

import copy
from typing import TypeVar

from torch import Tensor

from redrafter.config import DrafterConfig
from redrafter.drafters.checkpoint import Net
from redrafter.errors import DrafterMismatch
from redrafter.nets.eagle import EagleNet
from redrafter.nets.medusa import MedusaNet
from redrafter.nets.recurrent import RecurrentNet
from redrafter.targets import TargetInfo

N = TypeVar("N", RecurrentNet, MedusaNet, EagleNet)


def settled(net: N, target: TargetInfo) -> N:
    """In the target's precision and place, for use only; a caller's network, in training perhaps, stays as it is."""
    check_shapes(net.config, target)
    like = next(net.parameters())
    if net.training or like.dtype != target.dtype or like.device != target.device:
        net = copy.deepcopy(net)
    return net.to(device=target.device, dtype=target.dtype).eval()


def output_rows(net: Net, target: TargetInfo) -> Tensor:
    """(V', n) the target's output embedding, of the tokens that this network can guess."""
    weight: Tensor = target.output_embedding.weight.detach().to(target.device)
    return weight if net.token_ids is None else weight[net.token_ids]


def check_shapes(config: DrafterConfig, target: TargetInfo) -> None:
    """Raise unless a drafter of this shape can read this target."""
    count = target.layer_count
    for layer in config.layers:
        if not -count - 1 <= layer <= count:
            raise DrafterMismatch(f"the drafter reads hidden state {layer}, but {target.name} has {count} layers")
    for what, drafter, own in (
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("a context of", config.context_size, target.hidden_size * len(config.layers)),
        ("embeddings of", config.embedding_size, target.input_embedding.weight.shape[1]),
    ):
        if drafter != own:
            raise DrafterMismatch(f"the drafter expects {what} {drafter}, but the target {target.name} has {own}")
