"""The rule `seeded`: accept what plain decoding with the same seed would write. Lossless, token for token.

The target's choice at a node is argmax(scores + noise of the node's position), with noise that is a function of
(seed, position, token). Plain decoding makes the same choice there, so the text does not depend on the draft.
"""

from dataclasses import dataclass

from torch import Tensor

from redrafter.core.accept import Accepted, walk
from redrafter.core.rules.beam_search import BeamRule, BeamSearch, target_choices
from redrafter.core.rules.protocols import Search
from redrafter.core.sampling import node_logits
from redrafter.core.tree import Tree


@dataclass(frozen=True)
class SeededRule(BeamRule):
    """Searches under the target's noise and follows the target's own choices."""

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, BeamSearch)
        return accept_seeded(target_choices(search, tree, node_logits(logits, search.sampling, counts, tree)), tree)


def accept_seeded(choice: Tensor, tree: Tree) -> Accepted:
    """Follow the target's choices (B, N+1) down the tree for as long as the choice at a node is one of its children.

    >>> import torch
    >>> from redrafter.core.tree import pack_beam
    >>> tree, _ = pack_beam(torch.tensor([[[5, 6], [5, 7]]]), torch.tensor([4]))  # 4 -> 5 -> {6, 7}
    >>> accepted = accept_seeded(torch.tensor([[5, 7, 0, 8]]), tree)  # after 4: 5; after 5: 7; after 7: 8
    >>> accepted.tokens.tolist(), accepted.count.tolist()
    ([[5, 7, 8]], [3])
    """
    return walk(tree, choice, hit=tree.tokens == choice.gather(1, tree.parents))
