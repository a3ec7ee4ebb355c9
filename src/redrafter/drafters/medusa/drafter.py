"""Medusa at work: all depths in one pass, in a tree that is chosen once from the measured accuracies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.fixed_tree import FixedTree, sparse_tree
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters.base import NetDrafter, last_accepted, select_position
from redrafter.drafters.medusa.network import MedusaNet
from redrafter.targets import TargetInfo


@dataclass(frozen=True)
class MedusaState:
    """What the drafter keeps of the text."""

    context: Tensor  # (B, C) the hidden state that chose the last token


class MedusaDrafter(NetDrafter[MedusaNet]):
    """A `MedusaNet` bound to a target. In a shape W×L:N, W is the largest number of children of one node."""

    def __init__(self, net: MedusaNet, target: TargetInfo) -> None:
        super().__init__(net, target)
        self.accuracies: list[list[float]] = net.accuracies.view(net.config.heads, -1).tolist()
        self.trees: dict[Shape, FixedTree] = {}
        # Built once, on the host. As a decorator, this would import the compiler with every drafter.
        self.tree: Callable[[Shape], FixedTree] = torch.compiler.disable(self._tree)  # type: ignore[no-untyped-call]

    @property
    def default_length(self) -> int:
        return self.net.config.heads

    def _tree(self, shape: Shape) -> FixedTree:
        """The nodes to verify: those most often right according to the stored accuracies."""
        if shape not in self.trees:
            paths = sparse_tree(self.accuracies, shape.width, shape.length, shape.budget)
            self.trees[shape] = FixedTree.of(paths, self.vocabulary.device)
        return self.trees[shape]

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> MedusaState:
        return MedusaState(select_position(hidden, lengths - 1))

    def draft(self, state: MedusaState, last: Tensor, search: Search) -> Tree:
        tree = self.tree(search.shape)
        features = self.net.features(state.context)  # (heads, B, F)
        logits = self.logits(features) if self.net.own is None else torch.bmm(features, self.net.own.transpose(1, 2))
        return search.fixed(logits.transpose(0, 1), tree, last, self.net.token_ids)

    def use_int8(self) -> Self:
        """Vocabularies of the networks' own stay as they are."""
        return super().use_int8() if self.net.own is None else self

    def advance(self, state: MedusaState, accepted: Accepted, hidden: Tensor) -> MedusaState:
        return MedusaState(last_accepted(hidden, accepted))
