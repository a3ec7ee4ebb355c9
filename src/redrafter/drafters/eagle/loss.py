"""EAGLE's forward pass in training, and its additional loss on the guessed features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.drafters.eagle.network import EagleNet
from redrafter.drafters.training import LossInput


def training_features(net: EagleNet, inputs: LossInput) -> tuple[Tensor, Tensor]:
    """(T, n, F), and the distance (smooth L1) of the guessed features from the target's.

    As in drafting, every position continues from its own guesses of features, with the text's tokens. At depth d,
    position t attends as the pair at t + d: to the text's pairs up to t and to its own guesses since.
    """
    batch, true = inputs.batch, inputs.states
    tokens, (rows, width) = batch.tokens, batch.tokens.shape
    place = torch.arange(width, device=tokens.device)
    text = place <= place[:, None]  # (S, S)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    features, guessed, distance = true, [], torch.zeros((), device=tokens.device)
    for d, weight in enumerate(inputs.weights):
        chosen = tokens[:, (place + 1 + d).clamp(max=width - 1)]
        pair = net.pairs(features, inputs.embedded(chosen))
        query, key, value = net.attention(pair, (place + d).expand(rows, -1))
        keys.append(key)
        values.append(value)
        scores = (query @ keys[0].transpose(2, 3)).float().masked_fill(~text, -torch.inf)
        own = [(query * k).sum(-1, keepdim=True).float() for k in keys[1:]]
        shares = (torch.cat([scores, *own], -1) * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype)
        attended = shares[..., :width] @ values[0]
        for i, v in enumerate(values[1:]):
            attended = attended + shares[..., width + i, None] * v
        features = net.feature(pair, attended)
        at = features[batch.row, batch.at]
        guessed.append(at)
        expected = true[batch.row, (batch.at + 1 + d).clamp(max=width - 1)]
        gap = F.smooth_l1_loss(at.float(), expected.float(), reduction="none").mean(-1)
        distance = distance + weight * (gap * (batch.left > d)).sum()
    return torch.stack(guessed), distance
