"""The plan of one step: which rows draft how far, what is copied, and which drafted nodes pay for their time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from redrafter.config import Shape
from redrafter.core.tree import Tree
from redrafter.planning.calibration import MOST, calibrated
from redrafter.runtime.copied import Copied
from redrafter.runtime.host_tree import HostNodes, host_tree
from redrafter.runtime.row import Row

Ranked = tuple[float, int, int]
"""A node that may be verified: minus the probability that it is accepted, the place of its row, its id."""


def worth(nodes: list[Ranked], price: Callable[[int], float], most: int) -> list[Ranked]:
    """The nodes that pay: the likeliest, as many as promise the most tokens beyond their price.

    price: of so many nodes, in tokens. most: nodes of one row.

    >>> worth([(-0.5, 0, 1), (-0.9, 0, 2), (-0.1, 0, 3)], lambda n: 0.2 * n, 9)
    [(-0.9, 0, 2), (-0.5, 0, 1)]
    """
    fitting: list[Ranked] = []
    taken: dict[int, int] = {}
    count, gain, best = 0, 0.0, 0.0
    for node in sorted(nodes):
        taken[node[1]] = taken.get(node[1], 0) + 1
        if taken[node[1]] > most:
            continue
        fitting.append(node)
        gain -= node[0]
        if gain - price(len(fitting)) > best:
            count, best = len(fitting), gain - price(len(fitting))
    return fitting[:count]


@dataclass(frozen=True)
class Drafted:
    """The drafted nodes of one row that are verified."""

    nodes: dict[int, tuple[int, int]]  # id -> the parent's id, 0 for the root, and the token
    said: list[float]  # by id: the edge's probability, before the row's trust corrects it

    def decided(self, tokens: Sequence[int]) -> tuple[float, int]:
        """New tokens of the text: how many of the guesses that they decided should have been right, and were.

        >>> Drafted({1: (0, 5), 2: (0, 6), 3: (1, 7)}, [1, 0.6, 0.3, 0.5]).decided([5, 9])
        (1.4, 1)
        """
        at, expected, right = 0, 0.0, 0
        for token in tokens:
            following = None
            for node, (parent, guess) in self.nodes.items():
                if parent == at:
                    expected += self.said[node]
                    following = node if guess == token else following
            if following is None:
                break
            at, right = following, right + 1
        return expected, right


@dataclass
class Plan:
    """One step.

    shape: of the draft; None: nothing is drafted, and what was `copied` is verified alone. price: of so many nodes, in
    tokens that could be written meanwhile. trust: in what the drafter says, of each row. room: how deep a node of each
    row may be. most: nodes of one row. expected: accepted nodes of each row; of a draft, once it was made.
    """

    shape: Shape | None = None
    copied: Mapping[Row, Copied] = field(default_factory=dict)
    price: Callable[[int], float] = lambda _: 0.0
    trust: Mapping[Row, float] = field(default_factory=dict)
    room: Mapping[Row, int] = field(default_factory=dict)
    most: int = 0
    expected: dict[Row, float] = field(default_factory=dict)
    nodes: int = 0  # that the pass verifies, beside each row's last token
    drafted: dict[Row, Drafted] = field(default_factory=dict)
    reached: dict[Row, list[float]] = field(default_factory=dict)  # of all drafted nodes of a row
    levels: int = 0  # that were drafted

    def pack(self, order: Sequence[Row | None], nodes: HostNodes, last: Tensor) -> Tree:
        """The nodes of a draft that pay, as trees. order: the row at each place; None: it guesses nothing.

        A node is never likelier than its parent and has a larger id, so the nodes that pay are a tree.
        """
        ranked: list[Ranked] = []
        said = [[1.0] for _ in order]
        reached = [[1.0] for _ in order]
        for place, key in enumerate(order):
            if key is None or key not in self.trust:
                continue
            trust, room = self.trust[key], self.room[key]
            scores = [0.0]  # never above the parent's: rounding may have put one there
            for parent, depth, score in zip(
                nodes.parents[place], nodes.depths[place], nodes.scores[place], strict=True
            ):
                scores.append(min(score, scores[parent]))
                real = score > -math.inf and depth <= room
                said[place].append(calibrated(math.exp(scores[-1] - scores[parent])) if real else 0.0)
                reached[place].append(reached[place][parent] * min(MOST, trust * said[place][-1]))
            ranked += [(-p, place, node) for node, p in enumerate(reached[place][1:], 1) if p > 0]
        chosen: list[list[int]] = [[] for _ in order]
        for _, place, node in worth(ranked, self.price, self.most):
            chosen[place].append(node)
        for ids in chosen:
            ids.sort()
        for place, key in enumerate(order):
            if key is not None and key in self.trust:
                ids = chosen[place]
                self.drafted[key] = Drafted(
                    {node: (nodes.parents[place][node - 1], nodes.tokens[place][node - 1]) for node in ids},
                    said[place],
                )
                self.expected[key] = sum(reached[place][node] for node in ids)
                self.reached[key] = [p for p in reached[place][1:] if p > 0]
        self.nodes, self.levels = sum(map(len, chosen)), nodes.levels
        return host_tree(nodes, chosen, last)
