"""Medusa's forward pass in training, and the accuracies that its tree is chosen from."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.drafters.base import output_rows
from redrafter.drafters.medusa.network import RANKS, MedusaNet
from redrafter.drafters.training import LossInput, TrainingBatch
from redrafter.targets import Target


def training_features(net: MedusaNet, inputs: LossInput) -> tuple[Tensor, None]:
    """(T, n, F): network d at every position."""
    return net.features(inputs.context)[: inputs.depth], None


def measure_accuracies(net: MedusaNet, target: Target, batches: Iterable[TrainingBatch]) -> None:
    """Store in the network how often each of its best guesses is right."""
    net.accuracies.copy_(rank_accuracies(net, target, batches).flatten())


@torch.no_grad()
def rank_accuracies(net: MedusaNet, target: Target, batches: Iterable[TrainingBatch]) -> Tensor:
    """(heads, RANKS) how often the i-th best guess of a depth is the token in the text."""
    vocabulary, heads = output_rows(net, target), net.config.heads
    like = next(net.parameters())
    hits, count = torch.zeros(heads, RANKS, device=like.device), torch.zeros(heads, 1, device=like.device)
    ranks = min(RANKS, len(vocabulary))
    for batch in batches:
        states = target.states(batch.tokens, net.config.layers)[batch.row, batch.at]
        features = net.features(states.to(like.dtype))
        for d in range(heads):
            known = batch.left > d
            best = F.linear(features[d].to(vocabulary.dtype), vocabulary).topk(ranks).indices
            best = best if net.token_ids is None else net.token_ids[best]
            right = (best == batch.token_at(d + 1)[:, None]) & known[:, None]
            hits[d, :ranks] += right.sum(0)
            count[d] += known.sum()
    return hits / count.clamp(min=1)
