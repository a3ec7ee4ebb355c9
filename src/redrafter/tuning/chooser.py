"""Chooses the tree shape of the server's next step, from measured step costs and recent acceptance."""

from redrafter.config import Shape
from redrafter.tuning.acceptance import Acceptance
from redrafter.tuning.profile import MIN_SPEEDUP, Profile

RECOVERY = 0.0005
"""Share of the gap to 1 that the acceptance ratio regains in each plain step."""


class ShapeChooser:
    """Uses a profile's step costs and tokens/step, the latter scaled by how many drafted tokens were accepted lately.

    Without a profile, every step has the shape `fixed`; None is plain decoding.
    """

    def __init__(self, profile: Profile | None, fixed: Shape | None = None) -> None:
        self.profile, self.fixed = profile, fixed
        self.acceptance = Acceptance(1.0, RECOVERY)  # relative to the profile's tokens/step

    def choose(self, rows: int) -> Shape | None:
        """The fastest shape for this many rows. None is plain decoding."""
        if self.profile is None:
            return self.fixed
        measured = self._measured_rows(rows)
        shapes = [shape for shape in self.shapes(rows) if shape is not None]
        if not shapes:
            return None
        best = max(shapes, key=lambda shape: self.tokens_per_ms(shape, measured))
        needed = MIN_SPEEDUP * self.tokens_per_ms(None, measured)
        return best if self.tokens_per_ms(best, measured) >= needed else None

    def shapes(self, rows: int) -> list[Shape | None]:
        """All shapes that `choose` may return for this many rows."""
        if self.profile is None:
            return [self.fixed]
        measured = self._measured_rows(rows)
        return [cost.shape for cost in self.profile.step_costs if cost.rows == measured]

    def tokens_per_ms(self, shape: Shape | None, rows: int) -> float:
        """Expected tokens per millisecond and row."""
        assert self.profile is not None
        tokens = 1 + self.acceptance.ratio * (self.profile.tokens_per_step(shape) - 1)
        return tokens / self.profile.step_ms(shape, rows)

    def learn(self, shape: Shape | None, tokens: float, rows: int) -> None:
        """Update the acceptance after a step of this shape that gave `tokens` tokens to `rows` rows."""
        if self.profile is None or not rows:
            return
        if shape is None:
            self.acceptance.recover()
            return
        expected = self.profile.tokens_per_step(shape) - 1
        if expected > 0:
            self.acceptance.learn((tokens / rows - 1) / expected, rows)

    def _measured_rows(self, rows: int) -> int:
        """The next larger measured number of rows: a step costs more with more rows."""
        assert self.profile is not None
        measured = sorted({cost.rows for cost in self.profile.step_costs})
        return next((known for known in measured if known >= rows), measured[-1])
