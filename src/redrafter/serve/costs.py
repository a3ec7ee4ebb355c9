"""How much to guess for so many rows: what steps cost here, and how far guesses hold right now."""

from redrafter.config import Shape
from redrafter.engine.profile import MARGIN, Profile

MEMORY = 0.96
"""Weight of what was seen before, for each row and step."""
HOPE = 0.0005
"""How much of a disappointment a step without a guess forgives: texts change, and only a guess shows it."""


class Costs:
    """Chooses by a profile's costs and its tokens/step, the latter scaled by how guesses have fared lately."""

    def __init__(self, profile: Profile | None, fixed: Shape | None = None) -> None:
        self.profile, self.fixed = profile, fixed
        self.keen = 1.0  # guessed tokens kept, relative to the profile's

    def choose(self, rows: int) -> Shape | None:
        """The fastest shape for this many rows; None is plain decoding."""
        if self.profile is None:
            return self.fixed
        size = self._size(rows)
        shapes = [shape for shape in self.shapes(rows) if shape is not None]
        if not shapes:
            return None
        best = max(shapes, key=lambda s: self.rate(s, size))
        return best if self.rate(best, size) >= MARGIN * self.rate(None, size) else None

    def shapes(self, rows: int) -> list[Shape | None]:
        """All that may be chosen for this many rows."""
        if self.profile is None:
            return [self.fixed]
        size = self._size(rows)
        return [s.shape for s in self.profile.stepped if s.batch == size]

    def rate(self, shape: Shape | None, rows: int) -> float:
        """Tokens per millisecond and row that a measured number of rows can expect."""
        assert self.profile is not None
        tokens = 1 + self.keen * (self.profile.tokens_per_step(shape) - 1)
        return tokens / self.profile.step_ms(shape, rows)

    def learn(self, shape: Shape | None, tokens: float, rows: int) -> None:
        """A step with this shape gave its rows so many tokens."""
        if self.profile is None or not rows:
            return
        if shape is None:
            self.keen += HOPE * max(0.0, 1 - self.keen)
            return
        hoped = self.profile.tokens_per_step(shape) - 1
        if hoped > 0:
            seen = (tokens / rows - 1) / hoped
            weight = MEMORY**rows
            self.keen = min(2.0, max(0.0, weight * self.keen + (1 - weight) * seen))

    def _size(self, rows: int) -> int:
        """Measured for at least as many rows: a step's cost grows with them."""
        assert self.profile is not None
        sizes = sorted({s.batch for s in self.profile.stepped})
        return next((size for size in sizes if size >= rows), sizes[-1])
