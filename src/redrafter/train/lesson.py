"""What a drafter's network guesses at all positions of a batch and all depths, reading the text as it was written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters.base import output_rows
from redrafter.drafters.checkpoint import Net
from redrafter.nets.eagle import EagleNet
from redrafter.nets.medusa import RANKS, MedusaNet
from redrafter.nets.recurrent import RecurrentNet
from redrafter.targets import Target
from redrafter.train.batches import Batch


@dataclass(frozen=True)
class Lesson:
    """A batch with the target's hidden states, in the drafter's precision."""

    batch: Batch
    states: Tensor  # (B, S, C) of the drafter's layers
    embed: nn.Module
    weights: Sequence[float]  # of each depth

    @property
    def depth(self) -> int:
        return len(self.weights)

    def embedded(self, tokens: Tensor) -> Tensor:
        embedding: Tensor = self.embed(tokens)
        return embedding.detach().to(self.states.dtype)

    def padded(self, x: Tensor) -> Tensor:
        """(n, ...) -> (B, S, ...), zero where there is no position."""
        room = x.new_zeros(*self.batch.tokens.shape, *x.shape[1:])
        return room.index_put_((self.batch.row, self.batch.at), x)


def token_at(batch: Batch, depth: int) -> Tensor:
    """(n,) the token read at a depth, from 0: the last token."""
    if batch.rollouts is not None:
        return batch.rollouts[:, min(depth, batch.rollouts.shape[1] - 1)]
    at = (batch.at + 1 + depth).clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens[batch.row, at]


def guesses(net: Net, lesson: Lesson) -> tuple[Tensor, Tensor | None]:
    """Features (T, n, F) that the vocabulary is multiplied with, and a loss besides, if there is one."""
    if isinstance(net, MedusaNet):
        return net.features(lesson.states[lesson.batch.row, lesson.batch.at])[: lesson.depth], None
    if isinstance(net, EagleNet):
        return eagle(net, lesson)
    return recurrent(net, lesson), None


def recurrent(net: RecurrentNet, lesson: Lesson) -> Tensor:
    """Only the cell goes depth by depth; all else sees all depths at once."""
    batch = lesson.batch
    row, at = batch.row, batch.at

    def embedded(tokens: Tensor) -> Tensor:
        return net.token(lesson.embedded(tokens))

    embeddings = embedded(torch.stack([token_at(batch, d) for d in range(lesson.depth)]))  # (T, n, E)
    every = net.context(lesson.states)  # (B, S, C)
    context = every[row, at]
    read = [net.first_state(embeddings[0], context)]
    for embedding in embeddings[1:]:
        read.append(net.next_state(read[-1], net.heard(embedding)))
    state = torch.stack(read)  # (T, n, state)
    reading = None
    if net.memory is not None:
        following = F.pad(batch.tokens[:, 1:], (0, 1))
        pairs = net.memory.pairs(torch.cat([every, embedded(following)], -1))
        key, value = (x.transpose(1, 2).contiguous() for x in pairs)  # (B, heads, S, size)
        own = None
        if batch.rollouts is not None:
            mine = net.memory.pairs(torch.cat([context, embeddings[0]], -1))
            own = (lesson.padded(mine[0]).transpose(1, 2), lesson.padded(mine[1]).transpose(1, 2))
        weights = net.memory.weights(batch.tokens.shape[1], own=own is not None)
        query = lesson.padded(net.memory.queries(state).transpose(0, 1))  # (B, S, T, heads, size)
        query = query.permute(0, 3, 2, 1, 4).contiguous()
        reading = net.memory.read_all(query, key, value, weights, own)[row, at].transpose(0, 1)
    return net.features(state, net.share(context).expand(lesson.depth, -1, -1), reading)


def eagle(net: EagleNet, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Every position goes on from its own guesses of features, as in drafting, with the text's tokens.

    At depth d position t asks as the pair at t + d; it sees the text's pairs up to t and its own guesses since.
    """
    batch, true = lesson.batch, lesson.states
    tokens, (rows, width) = batch.tokens, batch.tokens.shape
    place = torch.arange(width, device=tokens.device)
    text = place <= place[:, None]  # (S, S)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    features, guessed, distance = true, [], torch.zeros((), device=tokens.device)
    for d, weight in enumerate(lesson.weights):
        read = tokens[:, (place + 1 + d).clamp(max=width - 1)]
        pair = net.pairs(features, lesson.embedded(read))
        query, key, value = net.attention(pair, (place + d).expand(rows, -1))
        keys.append(key)
        values.append(value)
        scores = (query @ keys[0].transpose(2, 3)).float().masked_fill(~text, -torch.inf)
        own = [(query * k).sum(-1, keepdim=True).float() for k in keys[1:]]
        shares = (torch.cat([scores, *own], -1) * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype)
        found = shares[..., :width] @ values[0]
        for i, v in enumerate(values[1:]):
            found = found + shares[..., width + i, None] * v
        features = net.feature(pair, found)
        at = features[batch.row, batch.at]
        guessed.append(at)
        meant = true[batch.row, (batch.at + 1 + d).clamp(max=width - 1)]
        gap = F.smooth_l1_loss(at.float(), meant.float(), reduction="none").mean(-1)
        distance = distance + weight * (gap * (batch.left > d)).sum()
    return torch.stack(guessed), distance


@torch.no_grad()
def rank_accuracies(net: MedusaNet, target: Target, batches: Iterable[Batch]) -> Tensor:
    """(heads, RANKS) how often the i-th best guess of a depth is the token written."""
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
            right = (best == token_at(batch, d + 1)[:, None]) & known[:, None]
            hits[d, :ranks] += right.sum(0)
            count[d] += known.sum()
    return hits / count.clamp(min=1)
