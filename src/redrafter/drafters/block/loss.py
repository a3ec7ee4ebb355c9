"""A block drafter's forward pass in training: the blocks of all positions at once."""

import torch
from torch import Tensor

from redrafter.drafters.block.network import BlockNet
from redrafter.drafters.training import LossInput


def training_features(net: BlockNet, inputs: LossInput) -> tuple[Tensor, None]:
    """(T, n, F). With a Markov head, what it knows of the token before each guess stands behind the features.

    Each position has a block of its own, which sees the text up to there and itself.
    """
    batch, config = inputs.batch, net.config
    rows, room = batch.tokens.shape
    shared = config.heads // config.key_heads
    last = inputs.padded(batch.at + 1)  # (B, P) places of the last tokens
    slots = torch.arange(config.slots, device=last.device)
    keys, values = net.memory(inputs.states, torch.arange(room, device=last.device).expand(rows, -1))

    def blocks(x: Tensor) -> Tensor:
        """(B, heads, P · slots, ·) -> (B, heads, P, slots, ·)."""
        return x.view(*x.shape[:2], -1, config.slots, x.shape[3])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        text, block = net.visible(layer, last, room)
        far_keys, far, near_keys, near = (
            x.repeat_interleave(shared, 1) for x in (keys[:, layer], values[:, layer], key, value)
        )
        seen = text.repeat_interleave(config.slots, 1)[:, None]  # (B, 1, P · slots, S)
        scores = (query @ far_keys.transpose(2, 3)).float().masked_fill(~seen, -torch.inf)
        own = (blocks(query) @ blocks(near_keys).transpose(3, 4)).float().masked_fill(~block, -torch.inf)
        shares = (torch.cat([scores, own.flatten(2, 3)], -1) * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype)
        attended: Tensor = shares[..., :room] @ far + (blocks(shares[..., room:]) @ blocks(near)).flatten(2, 3)
        return attended

    embeddings = net.block(inputs.padded(batch.token_at(0)), inputs.embedded)  # (B, P, slots, width)
    whole = net.run(embeddings.flatten(1, 2), (last[..., None] + slots).flatten(1), attend)
    each = whole.view(rows, -1, config.slots, config.width)[batch.row, batch.place]  # (n, slots, width)
    first = 0 if config.from_last else 1
    features = each[:, first : first + inputs.depth].transpose(0, 1)
    if net.markov is None:
        return features, None
    state, together = features.new_zeros(batch.positions, config.markov_rank), []
    for d, here in enumerate(features):
        known, state = net.markov.read(batch.token_at(d), here, state)
        together.append(torch.cat([here, known.to(here.dtype)], -1))
    return torch.stack(together), None
