"""The two interfaces of acceptance: a `Rule` makes a `Search` for each step and judges the tree the search returns."""

from typing import Protocol

from torch import Tensor

from redrafter.config import RuleConfig, Shape
from redrafter.core.accept import Accepted
from redrafter.core.beam import Advance, Grow, State
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.sampling import Sampling
from redrafter.core.tree import Tree


class Search(Protocol):
    """Turns a drafter's network or candidates into a packed tree. The rule hands one to the drafter in each step."""

    @property
    def shape(self) -> Shape:
        """How much to draft."""

    @property
    def visited(self) -> int:
        """How many nodes `tree` may visit."""

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Grow | None = None,
    ) -> Tree:
        """Search a network that advances token by token. A beam search may use `grow` instead of `advance`."""

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        """Pack candidate sequences (B, W, L) with node scores (B, W, L).

        If the budget is smaller than W·L, nodes with higher scores are kept. A score above its parent's is lowered to
        it. -inf marks a missing node. The rule `rejection` refuses candidates: they carry no probabilities.
        """

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        """Fill a fixed tree with the best tokens of each depth; logits (B, L, V') of all depths come at once."""


class Rule(Protocol):
    """An acceptance rule: which tree to draft, and which of its nodes to accept."""

    @property
    def config(self) -> RuleConfig:
        """The configuration this rule was made from."""

    @property
    def nodes(self) -> int:
        """N: drafted nodes verified per step."""

    def search(self, sampling: Sampling, seeds: Tensor, lengths: Tensor) -> Search:
        """The search of one step, for rows whose last tokens are at positions `lengths` (B,)."""

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        """Judge a verified tree: logits (B, N+1, V), and token counts (B, V) where penalties need them."""
