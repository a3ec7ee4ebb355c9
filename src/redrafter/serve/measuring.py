"""Step costs of this machine: from an earlier start, or measured while nobody waits."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from redrafter.config import Shape
from redrafter.engine import Engine
from redrafter.errors import ConfigError
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import MOST
from redrafter.tuning import batch_cost
from redrafter.tuning.chooser import ShapeChooser
from redrafter.tuning.profile import Profile
from redrafter.tuning.store import find_profile, profile_key, profile_path, read_profile, save_profile

log = logging.getLogger(__name__)


def key_of(engine: Engine, batch: Batch) -> dict[str, str]:
    key = profile_key(engine.target, engine.drafter, engine.runtime)
    return key | {"serving": str(batch.rows), "context": str(batch.context)}


def stored_profile(engine: Engine, batch: Batch, tune: str) -> Profile | None:
    """The profile of an earlier start, or of `redrafter tune` for as many rows; None if one has to be measured."""
    if tune == "again":
        return None
    key = key_of(engine, batch)
    kept = read_profile(profile_path(engine.target.name, key))
    if kept is not None and kept.key == key and _fits(kept, batch):
        return kept
    tuned = find_profile(engine.target, engine.drafter, engine.runtime)
    if tuned is not None and _fits(tuned, batch):
        enough = max(best.rows for best in tuned.best_shapes) >= batch.rows
        if enough or tune == "never":
            return tuned
    if tune == "never":
        raise ConfigError("there is no measurement yet: start once without --tune never, or give --width and --length")
    return None


def _fits(profile: Profile, batch: Batch) -> bool:
    return all(cost.shape is None or batch.fits(cost.shape) for cost in profile.step_costs)


class Measuring:
    """Spare work of the scheduler (`scheduler.SpareWork`): measures, keeps the profile and gives it to the chooser."""

    def __init__(
        self, engine: Engine, batch: Batch, shapes: Sequence[Shape], chooser: ShapeChooser, chunk: int = MOST
    ) -> None:
        """`chunk`: prompt tokens that are read in a step of others."""
        self.engine, self.batch, self.shapes, self.chooser, self.chunk = engine, batch, shapes, chooser, chunk

    def __call__(self, serve: Callable[[], None], check: Callable[[], None]) -> None:
        def progress(*_: Any) -> None:
            serve()

        log.info("measuring the cost of steps while nobody waits")
        key = key_of(self.engine, self.batch)
        profile = batch_cost.measure_profile(self.engine, self.batch, self.shapes, key, progress, check)
        log.info("step costs are kept in %s", save_profile(profile))
        measured = ShapeChooser(profile)
        if self.batch.recorded:  # before a request can choose a shape that is not recorded
            batch_cost.warm_up(self.batch, measured.shapes, progress=progress, chunk=self.chunk)
        self.chooser.profile = profile
