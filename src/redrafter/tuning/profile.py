"""`Profile`: the measurements of `redrafter tune` or the server, and the fastest shape that follows from them.

A profile holds step costs and tokens/step, not only the chosen shapes. It can therefore estimate the speed of any
simulated shape, for any number of rows.
"""

import dataclasses
from dataclasses import dataclass

from redrafter.config import Shape
from redrafter.errors import ConfigError
from redrafter.version import __version__

MIN_SPEEDUP = 1.03
"""A shape must be this much faster than plain decoding to be chosen. A smaller gain is within measurement noise."""
PROFILE_VERSION = f"{__version__}, format 2"
"""Costs change with the code, so a profile is valid for one version of redrafter and one file format."""


@dataclass(frozen=True)
class VerifyCost:
    """Time of a step that verifies `nodes` drafted tokens, without the drafter. 0 nodes is plain decoding."""

    rows: int
    nodes: int
    ms: float


@dataclass(frozen=True)
class DraftCost:
    """Time that drafting a beam adds to a step."""

    rows: int
    width: int
    length: int
    ms: float


@dataclass(frozen=True)
class SimulatedShape:
    """tokens/step of a shape, simulated on texts that the target wrote at this temperature."""

    shape: Shape
    temperature: float
    tokens_per_step: float


@dataclass(frozen=True)
class StepCost:
    """Measured time of a whole step. A shape of None is plain decoding."""

    rows: int
    shape: Shape | None
    ms: float


@dataclass(frozen=True)
class BestShape:
    """The fastest shape for this many rows. A shape of None is plain decoding."""

    rows: int
    shape: Shape | None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements for one target, drafter and machine. All shapes have an explicit node budget."""

    key: dict[str, str]
    """What the measurements depend on; see `store.profile_key`."""
    target_name: str
    temperature: float
    """Temperature of the texts that the shapes were simulated on."""
    verify_costs: tuple[VerifyCost, ...] = ()
    draft_costs: tuple[DraftCost, ...] = ()
    simulated: tuple[SimulatedShape, ...] = ()
    step_costs: tuple[StepCost, ...] = ()
    best_shapes: tuple[BestShape, ...] = ()
    version: str = PROFILE_VERSION

    def best_shape(self, rows: int) -> Shape | None:
        """The best shape for the nearest measured number of rows. None is plain decoding."""
        nearest = _nearest(rows, [best.rows for best in self.best_shapes])
        return next(best.shape for best in self.best_shapes if best.rows == nearest)

    def tokens_per_step(self, shape: Shape | None) -> float:
        """Simulated tokens/step of a shape; 1 for plain decoding."""
        if shape is None:
            return 1.0
        for row in self.simulated:
            if row.shape == with_budget(shape) and row.temperature == self.temperature:
                return row.tokens_per_step
        raise ConfigError(
            f"the profile has no tokens/step for W={shape.width}, L={shape.length}, N={shape.budget}: "
            "use a shape that redrafter tune simulated"
        )

    def tokens_per_second(self, shape: Shape | None, rows: int) -> float:
        """Throughput of all rows together."""
        return 1000 * rows * self.tokens_per_step(shape) / self.step_ms(shape, rows)

    def step_ms(self, shape: Shape | None, rows: int) -> float:
        """The measured step time if there is one, else the estimate."""
        rows = _nearest(rows, [cost.rows for cost in self.verify_costs] + [cost.rows for cost in self.step_costs])
        for cost in self.step_costs:
            if cost.rows == rows and cost.shape == (shape and with_budget(shape)):
                return cost.ms
        return self.estimated_step_ms(shape, rows)

    def estimated_step_ms(self, shape: Shape | None, rows: int) -> float:
        """Drafting plus verification, scaled so that the estimate for plain decoding equals its measurement.

        The scale matters on a GPU: component costs are measured with CUDA graphs alone, whole steps are compiled too.
        """
        plain = next((cost.ms for cost in self.step_costs if (cost.rows, cost.shape) == (rows, None)), None)
        scale = plain / self.component_ms(None, rows) if plain is not None else 1.0
        return scale * self.component_ms(shape, rows)

    def component_ms(self, shape: Shape | None, rows: int) -> float:
        """Measured drafting cost plus interpolated verification cost, without any scaling."""
        rows = _nearest(rows, [cost.rows for cost in self.verify_costs])
        if shape is None:
            return self.verify_ms(0, rows)
        for cost in self.draft_costs:
            if (cost.rows, cost.width, cost.length) == (rows, shape.width, shape.length):
                return cost.ms + self.verify_ms(shape.budget, rows)
        raise ConfigError(
            f"the profile has no drafting cost for W={shape.width}, L={shape.length}: "
            "use a shape that redrafter tune measured"
        )

    def verify_ms(self, nodes: int, rows: int) -> float:
        """Verification cost, interpolated linearly between the measured node counts and extrapolated beyond them."""
        known = sorted((cost.nodes, cost.ms) for cost in self.verify_costs if cost.rows == rows)
        if len(known) == 1:
            return known[0][1]
        right = next((i for i, (n, _) in enumerate(known) if n >= nodes and i > 0), len(known) - 1)
        (n0, ms0), (n1, ms1) = known[right - 1], known[right]
        return ms0 + (ms1 - ms0) * (nodes - n0) / (n1 - n0)

    def fastest_measured(self, rows: int) -> Shape | None:
        """The fastest shape with a measured step time. None if plain decoding is as fast."""
        shapes = [cost.shape for cost in self.step_costs if cost.rows == rows and cost.shape is not None]
        best = max(shapes, key=lambda shape: self.tokens_per_second(shape, rows), default=None)
        if best is None:
            return None
        needed = MIN_SPEEDUP * self.tokens_per_second(None, rows)
        return best if self.tokens_per_second(best, rows) >= needed else None


def with_budget(shape: Shape) -> Shape:
    """The same shape with its node budget as a number.

    >>> with_budget(Shape(width=2, length=3))
    Shape(width=2, length=3, nodes=6)
    """
    return dataclasses.replace(shape, nodes=shape.budget)


def rows_label(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _nearest(rows: int, measured: list[int]) -> int:
    if not measured:
        raise ConfigError("the profile holds no measurements: run redrafter tune again")
    return min(measured, key=lambda known: (abs(known - rows), known))
