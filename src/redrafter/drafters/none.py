"""No drafter: plain decoding is a step with an empty tree."""

from typing import Any

from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rules import Search
from redrafter.core.step import Drafter
from redrafter.core.tree import Tree, root_tree
from redrafter.targets import TargetInfo


class NoDrafter:
    """Drafts nothing. Its state is None."""

    name = "none"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=1, length=1)

    @property
    def network_drafter(self) -> Drafter | None:
        """None. A subclass that drafts does so by itself."""
        return None if type(self) is NoDrafter else self

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return None

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        return root_tree(last)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        return None

    def keep(self, state: Any, rows: Tensor) -> Any:
        return None


def make(target: TargetInfo) -> NoDrafter:  # noqa: ARG001 - as all drafters are made
    return NoDrafter()
