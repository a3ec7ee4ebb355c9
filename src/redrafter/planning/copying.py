"""Guesses that are copied from a row's own text on the host, with their odds. They cost no draft."""

from collections.abc import Sequence

from redrafter.drafters.ngram_index import NgramIndex
from redrafter.drafters.with_ngrams import FORGETS, LONGEST, ODDS, SHORTEST, TELLING
from redrafter.planning.calibration import MOST, Trust
from redrafter.runtime.copied import Copied

MOST_COPIED = 10
"""Tokens of a copied chain that are verified at once."""
TABLE_WEIGHT = 3.0
"""How many right tokens of a row count as much as the table of odds."""


class CopySource:
    """The text of one row, and what followed its end before. trust: in copied tokens of texts before."""

    def __init__(self, text: Sequence[int], *, sampled: bool, trust: float) -> None:
        self.index = NgramIndex((), TELLING, LONGEST)
        self.new = list(text)  # tokens that the index lacks
        self.odds = ODDS["sampled" if sampled else "greedy"]
        self.trust = Trust(TABLE_WEIGHT, FORGETS, first=trust)
        self.chain: list[int] = []
        self.match = 0  # tokens of the match; 0: nothing was looked up, or found

    def look_up(self, most: int) -> Copied:
        """At most so many tokens that followed the text's end before, with the table's odds, corrected by trust."""
        self.index.extend(self.new)
        self.new = []
        self.chain, self.match = self.index.chain(MOST_COPIED)
        if not self.match:
            return Copied()
        ratio = self.trust.ratio
        return Copied(self.chain[:most], [min(MOST, ratio * odds) for odds in self._table()][:most])

    def take(self, tokens: Sequence[int]) -> None:
        """New tokens of the text: count the copied tokens that they decided."""
        if self.match and tokens:
            right = 0
            while right < min(len(tokens), len(self.chain)) and tokens[right] == self.chain[right]:
                right += 1
            decided = min(right + 1, len(tokens), len(self.chain))
            self.trust.learn(sum(self._table()[:decided]), right)
        self.match = 0  # the chain was about the text's end before these tokens
        self.new += tokens

    def _table(self) -> list[float]:
        """The probability of each token of the chain if all before are right, whatever the row copied before."""
        first, second, later = self.odds[self.match - SHORTEST]
        return [first, second] + [later] * (len(self.chain) - 2)
