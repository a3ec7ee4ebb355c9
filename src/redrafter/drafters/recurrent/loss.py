"""The recurrent network's forward pass in training: all positions of a batch, all depths, along the text as written."""

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.drafters.training import LossInput


def training_features(net: RecurrentNet, inputs: LossInput) -> tuple[Tensor, None]:
    """(T, n, F). Only the cell runs depth by depth; everything else runs on all depths at once."""
    batch = inputs.batch

    def embedded(tokens: Tensor) -> Tensor:
        return net.token(inputs.embedded(tokens))

    embeddings = embedded(torch.stack([batch.token_at(d) for d in range(inputs.depth)]))  # (T, n, E)
    contexts = net.context(inputs.states)  # (B, S, C)
    context = contexts[batch.row, batch.at]
    states = [net.first_state(embeddings[0], context)]
    for embedding in embeddings[1:]:
        states.append(net.next_state(states[-1], net.token_input(embedding)))
    state = torch.stack(states)  # (T, n, state)
    reading = None
    if net.memory is not None:
        following = F.pad(batch.tokens[:, 1:], (0, 1))
        pairs = net.memory.pairs(torch.cat([contexts, embedded(following)], -1))
        key, value = (x.transpose(1, 2).contiguous() for x in pairs)  # (B, heads, S, size)
        own = None
        if batch.rollouts is not None:
            mine = net.memory.pairs(torch.cat([context, embeddings[0]], -1))
            own = (inputs.padded(mine[0]).transpose(1, 2), inputs.padded(mine[1]).transpose(1, 2))
        weights = net.memory.weights(batch.first, batch.most, batch.tokens.shape[1], own=own is not None)
        query = inputs.padded(net.memory.queries(state).transpose(0, 1))  # (B, P, T, heads, size)
        query = query.permute(0, 3, 2, 1, 4).contiguous()
        reading = net.memory.read_all(query, key, value, weights, own)[batch.row, batch.place].transpose(0, 1)
    return net.features(state, net.share(context).expand(inputs.depth, -1, -1), reading), None
