"""The training objective: the loss of a drafter's guesses at all positions and depths, in bounded memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters import registry
from redrafter.drafters.base import DrafterNet
from redrafter.drafters.training import LossInput, TrainingBatch
from redrafter.targets import Target
from redrafter.train.config import TrainConfig
from redrafter.train.losses import LOSSES, Loss
from redrafter.train.teacher import Teacher


@dataclass(frozen=True)
class States:
    """The target's hidden states that a batch needs."""

    context: Tensor  # (B, S, C) of the drafter's layers
    last: Tensor  # (B, S, H) after the final norm
    rollouts: Tensor | None = None  # (n, T, H) after the final norm, of each position's own rollout

    def rows(self, places: Tensor, width: int) -> "States":
        """The states of some texts, cut to the longest of these."""
        return States(self.context[places, :width], self.last[places, :width])


@dataclass(frozen=True)
class Score:
    """Sums over a batch, kept on the device so that the host does not wait for them."""

    loss: Tensor  # ()
    right: Tensor  # (T,) guesses whose best token is the one in the text
    count: Tensor  # (T,) guesses


class Objective(nn.Module):
    """The network with its loss. One forward is one micro-batch; the loss is a sum, not a mean."""

    def __init__(
        self,
        net: DrafterNet,
        target: Target,
        *,
        depth: int,
        loss: str,
        decay: float,
        chunk: int | None,
        bf16: bool,
        feature_loss: float = 1.0,
    ) -> None:
        super().__init__()
        self.net, self.feature_loss = net, feature_loss
        self.features = registry.get(net.config.kind).features
        on_gpu = target.device.type == "cuda"
        self.depth, self.chunk, self.bf16 = depth, chunk or (8192 if on_gpu else 512), bf16
        self.reach = loss == "acceptance"  # weigh a depth by the probability that all depths before it are accepted
        self.weights = [decay**d for d in range(depth)]
        self.embed = [target.input_embedding]  # in a list: this module neither trains nor saves it
        self.teacher = Teacher(target, net.token_ids)
        self.needs_teacher = loss != "hard"
        self.score: Callable[..., tuple[Tensor, Tensor, Tensor]] = functools.partial(score, LOSSES[loss])
        self.one_size = on_gpu  # compile for chunks of one size: fewer passes over the logits
        if on_gpu:
            self.score = torch.compile(self.score, dynamic=False)
        self.labels = label_table(net.token_ids, target.vocab_size, target.device)

    def forward(self, batch: TrainingBatch, states: States) -> tuple[Tensor, Score]:
        device = batch.tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            features, additional = self.features(self.net, self._inputs(batch, states))  # (T, n, F)
            vocabulary = self.net.training_vocabulary(self.teacher.weight)
        if self.bf16:
            vocabulary = vocabulary.bfloat16()
        total, right, count = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            features.to(vocabulary.dtype), vocabulary, self, batch, states
        )
        if additional is not None:
            total = total + self.feature_loss * additional
        return total, Score(total.detach(), right, count)

    def _inputs(self, batch: TrainingBatch, states: States) -> LossInput:
        dtype = torch.bfloat16 if self.bf16 else next(self.net.parameters()).dtype
        return LossInput(batch, states.context.to(dtype), self.embed[0], self.weights)

    def label(self, batch: TrainingBatch, depth: int) -> Tensor:
        """(n,) index among the guessable tokens of the token to guess at a depth, -1 if it is not guessable."""
        return self.labels[batch.token_at(depth + 1)]

    def target_probabilities(self, batch: TrainingBatch, states: States, start: int, stop: int) -> list[Tensor | None]:
        """The target's probabilities (stop − start, V') at each depth for these positions."""
        if not self.needs_teacher:
            return [None] * self.depth
        if states.rollouts is not None:
            last, fill = states.rollouts.shape[1] - 1, max(0, stop - states.rollouts.shape[0])
            own = F.pad(states.rollouts[start:stop], (0, 0, 0, 0, 0, fill))
            return [self.teacher.probabilities(own[:, min(d, last)]) for d in range(self.depth)]
        # Position i at depth d asks about the token that position i + d − 1 asks about at depth 1: compute each once.
        n = batch.positions
        where = torch.arange(start, stop + self.depth - 1, device=batch.row.device).clamp(max=n - 1)
        at = (batch.at[where] + 1).clamp(max=batch.tokens.shape[1] - 1)
        p = self.teacher.probabilities(states.last[batch.row[where], at])
        return [p[d : d + stop - start] for d in range(self.depth)]


def make_objective(net: DrafterNet, target: Target, config: TrainConfig) -> Objective:
    """The objective that a configuration asks for."""
    return Objective(
        net,
        target,
        depth=config.depth,
        loss=config.loss,
        decay=config.depth_decay,
        chunk=config.chunk,
        bf16=config.bf16 if config.bf16 is not None else target.device.type == "cuda",
        feature_loss=config.feature_loss,
    )


class VocabularyLoss(torch.autograd.Function):
    """Computes logits for one chunk of positions at one depth at a time, and their gradients right away."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, vocabulary: Tensor, objective: Objective, batch: TrainingBatch, states: States
    ) -> tuple[Tensor, Tensor, Tensor]:
        depth, n, _ = features.shape
        device = features.device
        by_features = torch.zeros_like(features)
        by_vocabulary = torch.zeros_like(vocabulary, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=device)
        right, count = torch.zeros(depth, device=device), torch.zeros(depth, device=device)
        size = objective.chunk if objective.one_size else -(-n // -(-n // objective.chunk))
        fill = -n % size  # pad the last chunk to full size; the padding has weight 0
        left = F.pad(batch.left, (0, fill))
        labels = [F.pad(objective.label(batch, d), (0, fill)) for d in range(depth)]
        for start in range(0, n, size):
            stop = start + size
            probabilities = objective.target_probabilities(batch, states, start, stop)
            reach = torch.ones(size, device=device)
            for d in range(depth):
                x = features[d, start:stop]
                x = F.pad(x, (0, 0, 0, size - x.shape[0]))
                logits = F.linear(x, vocabulary)
                valid = (left[start:stop] > d).float()
                weight = objective.weights[d] * valid * reach
                value, gradient, hit = objective.score(logits, probabilities[d], labels[d][start:stop], weight)
                total += (value * weight).sum()
                by_features[d, start:stop] = (gradient @ vocabulary)[: n - start]
                if by_vocabulary is not None:
                    by_vocabulary += (gradient.T @ x).float()
                if objective.reach:
                    reach = reach * (-value).exp()
                right[d] += (hit * valid).sum()
                count[d] += valid.sum()
        ctx.save_for_backward(by_features, by_vocabulary)
        ctx.mark_non_differentiable(right, count)
        return total, right, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        by_features, by_vocabulary = ctx.saved_tensors
        own = None if by_vocabulary is None else by_vocabulary * grad
        return by_features * grad, own, None, None, None


def score(loss: Loss, logits: Tensor, p: Tensor | None, label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values (n,), the weighted gradient (n, V') in the logits' precision, and whether the best guess is right (n,)."""
    value, gradient = loss(logits, p, label)
    return value, (gradient * weight[:, None]).to(logits.dtype), logits.argmax(-1) == label


def label_table(token_ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """(V,) index of each target token among the guessable tokens, -1 if it is not guessable.

    >>> label_table(torch.tensor([5, 2]), 6, torch.device("cpu")).tolist()
    [-1, -1, 1, -1, -1, 0]
    """
    if token_ids is None:
        return torch.arange(vocab_size, device=device)
    table = torch.full((vocab_size,), -1, device=device)
    table[token_ids.to(device)] = torch.arange(len(token_ids), device=device)
    return table


def add_scores(scores: Sequence[Score]) -> Score:
    def total(pick: Callable[[Score], Tensor]) -> Tensor:
        return torch.stack([pick(s) for s in scores]).sum(0)

    return Score(total(lambda s: s.loss), total(lambda s: s.right), total(lambda s: s.count))
