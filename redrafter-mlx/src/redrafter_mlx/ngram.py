"""The text's own n-grams: where the end of the text occurred before, the tokens that followed there are a guess.

All of this is done on the host, which knows the text after every step anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from redrafter_mlx.beam import Chain

SHORTEST, LONGEST = 1, 5  # tokens of a match
TELLING = 2
"""Tokens of the shortest match that tells whether this text repeats itself. One token often matches by chance."""
DEEPEST = 15  # tokens of a chain
GREEDY = [[0.15, 0.60, 0.73], [0.55, 0.70, 0.81], [0.66, 0.72, 0.82], [0.74, 0.82, 0.84], [0.77, 0.84, 0.91]]
SAMPLED = [[0.095, 0.33, 0.60], [0.40, 0.47, 0.66], [0.52, 0.60, 0.66], [0.58, 0.44, 0.63], [0.64, 0.69, 0.79]]
ODDS = np.array([GREEDY, SAMPLED], dtype=np.float32)[..., [0, 1] + [2] * (DEEPEST - 2)]
"""Probability that a copied token is right if all copied tokens before it were, by match length (1, 2, 3, 4, 5 or
more): for the first token of the chain, for the second and for later ones. The same table as in redrafter, where the
first odds of a single token are halved."""
FORGETS = np.float32(0.9)  # how much of the count of hits remains after each step whose match is TELLING
PRIOR = 2.0  # copied tokens, all of them right, that a row's count of hits begins with


def find_chain(
    text: Sequence[int], length: int, longest: int = LONGEST, shortest: int = SHORTEST
) -> tuple[list[int], int]:
    """The tokens after the longest, then most recent, earlier match of the text's end, and the match's length.

    If the text ends before the chain does, the chain repeats: the text is in a loop. A length of 0: no match.

    >>> find_chain([1, 2, 3, 9, 1, 2], 3)
    ([3, 9, 1], 2)
    """
    ids = np.asarray(text, dtype=np.int64)
    end = len(ids)
    run = np.zeros(end, dtype=np.int64)  # run[e]: tokens before e that equal the text's end
    going = np.ones(end, dtype=bool)
    for back in range(1, longest + 1):
        if back > end:
            break
        going[:back] = False
        going[back:] &= ids[: end - back] == ids[end - back]
        run += going
    usable = np.flatnonzero(run >= shortest)
    if not len(usable):
        return [0] * length, 0
    start = int(usable[np.lexsort((usable, run[usable]))[-1]])
    return [int(ids[start + i % (end - start)]) for i in range(length)], int(run[start])


@dataclass
class Ngrams:
    """The n-grams of one row: the chain for the next step, and how often recent chains were right."""

    text: list[int]
    hits: np.ndarray = field(default_factory=lambda: np.full(2, PRIOR, dtype=np.float32))
    chain: list[int] = field(default_factory=list)
    match: int = 0

    def __post_init__(self) -> None:
        self.chain, self.match = find_chain(self.text, DEEPEST)

    def advance(self, tokens: list[int]) -> None:
        """Take in new tokens; count what they decided of a TELLING chain: the right ones, and the first wrong."""
        width = min(DEEPEST, len(tokens))
        if self.match >= TELLING and tokens:
            right = next((i for i in range(width) if tokens[i] != self.chain[i]), width)
            self.hits = FORGETS * self.hits + np.array([right, min(right + 1, width)], dtype=np.float32)
        self.text += tokens
        self.chain, self.match = find_chain(self.text, DEEPEST)

    def odds(self, sampled: bool) -> np.ndarray:
        """(D,) the table's odds, corrected by the row's own recent hits; 0 where nothing matches."""
        if not self.match:
            return np.zeros(DEEPEST, dtype=np.float32)
        return ODDS[int(sampled), self.match - SHORTEST] * (self.hits[0] / self.hits[1])


def chain_of(rows: Sequence[Ngrams], sampled: bool, length: int) -> Chain | None:
    """The first tokens of the chains of all rows; None if no row has one."""
    if not any(row.match for row in rows):
        return None
    tokens, odds = ([row.chain for row in rows], [row.odds(sampled) for row in rows])
    return Chain(mx.array(tokens)[:, :length], mx.array(np.stack(odds))[:, :length])
