"""Medusa: a network for each depth, all read at once, in a tree that was settled beforehand."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.fixed_tree import FixedTree, sparse_tree
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import int8
from redrafter.drafters.base import output_rows, settled
from redrafter.drafters.int8 import Product
from redrafter.nets.medusa import MedusaNet
from redrafter.targets import Target


@dataclass(frozen=True)
class Chosen:
    """All there is to remember: the hidden state that chose the last token."""

    context: Tensor  # (B, C)


class MedusaDrafter:
    """A `MedusaNet` bound to a target. Of a shape W×L:N, W is the most guesses that one node's children may be."""

    name = "medusa"

    def __init__(self, net: MedusaNet, target: Target) -> None:
        self.net = settled(net, target)
        self.vocabulary = output_rows(net, target)
        self.logits: Product = lambda x: F.linear(x, self.vocabulary)
        self.accuracies: list[list[float]] = net.accuracies.view(net.config.heads, -1).tolist()
        self.trees: dict[Shape, FixedTree] = {}

    @property
    def default_shape(self) -> Shape:
        on_gpu = self.vocabulary.device.type == "cuda"
        return Shape(width=16, length=self.net.config.heads, nodes=63) if on_gpu else Shape(width=3, length=3, nodes=5)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.config.layers

    def lean(self) -> "MedusaDrafter":
        """On a CPU in fp32: products of int8 weights. For networks that we read ourselves."""
        if int8.fits(self.vocabulary):
            int8.lean_linears(self.net)
            self.logits = int8.rounded(self.vocabulary)
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # made once, on the host
    def tree(self, shape: Shape) -> FixedTree:
        """Which guesses are verified: the most often right, as far as these numbers go."""
        if shape not in self.trees:
            paths = sparse_tree(self.accuracies, shape.width, shape.length, shape.budget)
            self.trees[shape] = FixedTree.of(paths, self.vocabulary.device)
        return self.trees[shape]

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Chosen:
        return Chosen(_pick(hidden, lengths - 1))

    def draft(self, state: Chosen, last: Tensor, search: Search) -> Tree:
        tree = self.tree(search.shape)
        logits = self.logits(self.net.features(state.context).transpose(0, 1))  # (B, heads, V')
        return search.fixed(logits, tree, last, self.net.token_ids)

    def advance(self, state: Chosen, accepted: Accepted, hidden: Tensor) -> Chosen:
        return Chosen(_pick(hidden, (accepted.count - 1).clamp(min=0)))

    def keep(self, state: Chosen, rows: Tensor) -> Chosen:
        return keep_rows(state, rows)


def _pick(hidden: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B,) -> (B, C)."""
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
