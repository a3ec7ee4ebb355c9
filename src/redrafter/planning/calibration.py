"""How likely a guess is accepted, from what its source says of it.

A source says how probable each edge of its tree is: that a token follows if all tokens before it are right. What it
says becomes min(MOST, ratio · said ** POWER). A path is the product of its edges, so no path is likelier than its
beginning. The power fits what trained drafters say and what is accepted. The ratio is learned, of each drafter and
slowly of each row: a source that is right less often than it says loses its nodes by this alone.
"""

import math
from dataclasses import dataclass

from redrafter.core.flat import MOST as MOST
from redrafter.core.flat import POWER as POWER


@dataclass
class Trust:
    """How often guesses were right lately, relative to what was expected of them.

    weight: how many expected guesses the first ratio counts for. keeps: the share of a count that is left after each
    step.

    >>> trust = Trust(weight=4, keeps=1.0)
    >>> trust.learn(expected=4.0, right=0)
    >>> trust.ratio
    0.5
    """

    weight: float
    keeps: float
    first: float = 1.0
    right: float = 0.0
    expected: float = 0.0

    @property
    def ratio(self) -> float:
        return (self.weight * self.first + self.right) / (self.weight + self.expected)

    def learn(self, expected: float, right: float) -> None:
        """A step decided guesses of which so many were expected to be right, and so many were."""
        self.right = self.keeps * self.right + right
        self.expected = self.keeps * self.expected + expected


def calibrated(said: float) -> float:
    """What to expect of an edge by the measured power alone.

    >>> round(calibrated(0.5), 3), calibrated(1.0)
    (0.555, 0.98)
    """
    return min(MOST, math.pow(said, POWER))
