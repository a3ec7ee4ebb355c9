"""The rule `typical`: accept a drafted token that the target finds probable enough. Lossy."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.core.accept import Accepted, walk
from redrafter.core.rules.beam_search import BeamRule, BeamSearch, target_choices
from redrafter.core.rules.protocols import Search
from redrafter.core.sampling import node_logits, restrict
from redrafter.core.tree import Tree


@dataclass(frozen=True)
class TypicalRule(BeamRule):
    """Searches under the target's noise and accepts by probability: see `typical_threshold`."""

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, BeamSearch)
        logits = node_logits(logits, search.sampling, counts, tree)
        choice = target_choices(search, tree, logits)
        scores = restrict(logits, search.sampling)
        return accept_typical(scores, choice, tree, epsilon=self.config.epsilon, delta=self.config.delta)


def typical_threshold(logp: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(epsilon, delta · exp(−H)) of each distribution, with H its entropy.

    >>> even = torch.full((4,), 0.25).log()
    >>> round(float(typical_threshold(even, epsilon=0.3, delta=0.09)), 4)  # 0.09 / 4
    0.0225
    """
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def accept_typical(scores: Tensor, choice: Tensor, tree: Tree, *, epsilon: float, delta: float) -> Accepted:
    """Accept every node whose probability exceeds its parent's threshold, and keep the deepest path.

    `scores` (B, N+1, V) and `choice` (B, N+1) are the target's. The choice at the last accepted node ends the step.
    """
    logp = scores.log_softmax(-1)  # (B, N+1, V)
    threshold = typical_threshold(logp, epsilon, delta)  # (B, N+1)
    index = tree.parents[:, :, None].expand_as(logp)
    probability = logp.gather(1, index).gather(2, tree.tokens[..., None])[..., 0].exp()
    accepted = walk(tree, choice, hit=probability > threshold.gather(1, tree.parents))
    # An accepted token need not be the target's choice: the new tokens are the nodes' own, then one choice.
    nodes = tree.tokens.gather(1, accepted.path)
    drafted = torch.cat([nodes[:, 1:], nodes[:, :1]], dim=1)
    place = torch.arange(tree.length + 1, device=scores.device)
    tokens = torch.where(place < accepted.count[:, None] - 1, drafted, accepted.tokens)
    return replace(accepted, tokens=tokens)
