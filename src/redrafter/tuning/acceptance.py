"""How well drafts do lately, relative to what was expected of them."""

DECAY = 0.96
"""Weight of the old acceptance ratio in its moving average, for each row of a step."""
MAX_RATIO = 2.0


class Acceptance:
    """A moving average of accepted tokens per step, relative to the expected ones.

    recovery: the share of the gap to 1 that the ratio regains in each step without a draft. Such steps say nothing
    about drafts. Without recovery, a drafter that once seemed useless would never be tried again.
    """

    def __init__(self, ratio: float, recovery: float) -> None:
        self.ratio, self.recovery = ratio, recovery

    def learn(self, seen: float, rows: int = 1) -> None:
        """A draft for `rows` rows gave this ratio."""
        weight = DECAY**rows
        self.ratio = min(MAX_RATIO, max(0.0, weight * self.ratio + (1 - weight) * seen))

    def recover(self) -> None:
        """A step without a draft."""
        self.ratio += self.recovery * max(0.0, 1 - self.ratio)
