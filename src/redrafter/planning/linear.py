"""A price in seconds that is a sum of few features, each at a price of its own, learned while the work is done."""

from collections.abc import Sequence
from operator import mul

from redrafter.config import require

SPREAD = 0.5
"""How far the first prices may be from the true ones, relative to them."""
DRIFT = 0.01
"""How much a price may change from one measurement to the next: temperature, other programs."""
SURPRISE, FIRST_SURPRISE, FIRST = 1.3, 3.0, 4
"""A measurement counts as at most this many times the known price, or as little as one over it: on a machine with other
programs, some steps take many times as long. The first measurements may say more: another machine has other prices."""
KNOWN = 0.15
"""How far prices that were saved may be from the true ones, relative to them."""
MOST_SECONDS = 1000.0
"""Of a unit."""
LEAST, MOST = 0.05, 30.0
"""How far a price can move from the first one."""


class LinearPrice:
    """Seconds for a list of features, by a Kalman filter over the features' prices relative to their first ones.

    first: the price of each feature, with the first one at 1. The first measurement tells how many seconds that is.
    noise: how far one measurement is usually from the price, relative to it.

    >>> price = LinearPrice([1.0, 0.2])
    >>> for features, seconds in [([1, 0], 0.01), ([1, 4], 0.03)] * 40:
    ...     price.learn(features, seconds)
    >>> round(price([1, 0]), 4), round(price([1, 2]), 3)
    (0.01, 0.02)
    """

    def __init__(self, first: Sequence[float], noise: float = 0.15) -> None:
        self.first, self.noise = list(first), noise
        self.prices = [1.0] * len(first)  # relative to the first ones
        self.unit = 0.0  # seconds; 0: nothing was measured yet
        self.doubt = [[SPREAD**2 * (i == j) for j in range(len(first))] for i in range(len(first))]
        self.seen = 0

    @property
    def known(self) -> bool:
        return self.unit > 0

    def __call__(self, features: Sequence[float]) -> float:
        """Seconds; before the first measurement, multiples of the first feature's price."""
        seconds: float = sum(map(mul, map(mul, self.first, self.prices), features)) * (self.unit or 1.0)
        return seconds

    def of(self, feature: int) -> float:
        """The price in seconds of one of this feature."""
        return self.first[feature] * self.prices[feature] * (self.unit or 1.0)

    def saved(self) -> tuple[float, ...]:
        """The seconds of a unit and the prices, for `restore`."""
        return (self.unit, *self.prices)

    def restore(self, saved: Sequence[float]) -> None:
        """Begin with prices that were saved; ConfigError if they cannot be prices of these features."""
        require(len(saved) == 1 + len(self.first), f"{len(saved) - 1} prices for {len(self.first)} features")
        unit, *prices = map(float, saved)
        require(0 <= unit < MOST_SECONDS, f"a pass of {unit} seconds")  # False for NaN, too
        require(all(LEAST <= price <= MOST for price in prices), "a price out of bounds")
        self.unit, self.prices = unit, prices
        if unit:
            self.seen = FIRST
            self.doubt = [[KNOWN**2 * (i == j) for j in range(len(prices))] for i in range(len(prices))]

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Lists and not arrays: for so few numbers these are faster."""
        if seconds <= 0:  # shorter than the clock can tell
            return
        parts = list(map(mul, self.first, features))
        if not self.unit:
            self.unit = seconds / sum(parts)
        self.seen += 1
        expected = sum(map(mul, parts, self.prices))
        most = SURPRISE if self.seen > FIRST else FIRST_SURPRISE
        off = expected * (min(max(seconds / self.unit / expected, 1 / most), most) - 1)
        for i, row in enumerate(self.doubt):
            row[i] += DRIFT**2
        toward = [sum(map(mul, row, parts)) for row in self.doubt]
        spread = sum(map(mul, parts, toward)) + (self.noise * expected) ** 2
        for i, (row, each) in enumerate(zip(self.doubt, toward, strict=True)):
            self.prices[i] = min(max(self.prices[i] + each / spread * off, LEAST), MOST)
            for j, other in enumerate(toward):
                row[j] -= each * other / spread
