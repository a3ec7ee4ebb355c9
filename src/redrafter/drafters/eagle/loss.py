"""EAGLE's forward pass in training, and its additional loss on the guessed features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.drafters.eagle.network import EagleNet
from redrafter.drafters.training import LossInput


def training_features(net: EagleNet, inputs: LossInput) -> tuple[Tensor, Tensor | None]:
    """(T, n, F); where the features are the target's own, also their distance (smooth L1) from the guessed ones.

    As in drafting, every position continues from its own guesses of features, with the text's tokens. At depth d,
    position t attends as the pair at t + d: to the text's pairs up to t and to its own guesses since.
    """
    batch, true = inputs.batch, net.first_features(inputs.states)
    tokens, (rows, width) = batch.tokens, batch.tokens.shape
    place = torch.arange(width, device=tokens.device)
    text = place <= place[:, None]  # (S, S)
    shared = net.config.heads // net.config.key_heads
    keys: list[list[Tensor]] = [[] for _ in net.blocks]
    values: list[list[Tensor]] = [[] for _ in net.blocks]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys[layer].append(key.repeat_interleave(shared, 1))
        values[layer].append(value.repeat_interleave(shared, 1))
        own = [(query * k).sum(-1, keepdim=True).float() for k in keys[layer][1:]]
        scores = (query @ keys[layer][0].transpose(2, 3)).float().masked_fill(~text, -torch.inf)
        shares = (torch.cat([scores, *own], -1) * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype)
        attended: Tensor = shares[..., :width] @ values[layer][0]
        for i, v in enumerate(values[layer][1:]):
            attended = attended + shares[..., width + i, None] * v
        return attended

    features, guessed, distance = true, [], torch.zeros((), device=tokens.device)
    for d, weight in enumerate(inputs.weights):
        chosen = tokens[:, (place + 1 + d).clamp(max=width - 1)]
        embedded = inputs.embedded(chosen) if net.embedding is None else net.embedding(chosen)
        output = net.run(features, embedded, (place + d).expand(rows, -1), attend)
        assert output is not None
        features = net.next_features(output)
        at = net.for_head(output[batch.row, batch.at])
        guessed.append(at)
        expected = true[batch.row, (batch.at + 1 + d).clamp(max=width - 1)]
        gap = F.smooth_l1_loss(at.float(), expected.float(), reduction="none").mean(-1)
        distance = distance + weight * (gap * (batch.left > d)).sum()
    return torch.stack(guessed), None if net.config.projected else distance
