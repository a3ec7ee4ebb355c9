"""How a run's updates are laid out: the learning rate, and what fits into a time limit."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from redrafter.train.config import TrainConfig

LEAST_POSITIONS = 64
UPDATES = 100
"""Updates that a run in limited time should have at least: they get smaller for it."""
EVALUATIONS, EVALUATION_SHARE = 10, 0.3
"""Evaluations in limited time at most, and the part of the time that they all may take."""


@dataclass(frozen=True)
class Speed:
    """Seconds that things take on this machine, measured at the start."""

    position: float
    """A position of an update."""
    texts: int
    """How many held-out texts one evaluation was measured with; 0 if one text takes too long."""
    evaluation: float
    """That evaluation."""


@dataclass(frozen=True)
class Plan:
    """What fits into the time of a run. It goes with the checkpoints, for a resumed run keeps to it."""

    seconds: float
    """When the last update ends; an evaluation follows."""
    positions: int
    updates: int
    """About so many, for time ends the run; the warm-up and the evaluations go by it."""
    interval: int
    """Updates between two evaluations."""
    held_out: int
    """Texts in an evaluation; 0: no time for any."""

    @classmethod
    def of(cls, config: TrainConfig, speed: Speed, seconds: float, held_out: int, most: int) -> Self:
        """held_out: texts that were kept out of training. most: positions of the largest update that the data gives.

        >>> config = TrainConfig(minutes=1)
        >>> Plan.of(config, Speed(position=0.01, texts=1, evaluation=2.0), 60, held_out=5, most=2000)
        Plan(seconds=58.0, positions=64, updates=65, interval=8, held_out=1)
        >>> Plan.of(config, Speed(position=1e-5, texts=128, evaluation=2.0), 60, held_out=128, most=9000)
        Plan(seconds=58.0, positions=8192, updates=512, interval=57, held_out=115)
        >>> Plan.of(config, Speed(position=0.1, texts=0, evaluation=0.0), 20, held_out=5, most=9000)
        Plan(seconds=20.0, positions=64, updates=3, interval=3, held_out=0)
        """
        seconds = max(seconds, 1e-3)  # where it is over, one small update
        learning = seconds * (1 - EVALUATION_SHARE if speed.texts else 1)
        positions = max(LEAST_POSITIONS, min(config.positions, int(learning / UPDATES / speed.position)))
        updates = max(1, int(learning / (min(positions, most) * speed.position)))
        texts, evaluation, evaluations = 0, 0.0, 1
        if speed.texts:
            share = (seconds - learning) / EVALUATIONS
            texts = max(1, min(held_out, int(speed.texts * share / speed.evaluation)))
            evaluation = speed.evaluation * max(1.0, texts / speed.texts)
            evaluations = max(1, min(EVALUATIONS, int((seconds - learning) / evaluation)))
        interval = config.evaluate_every or -(-updates // evaluations)
        return cls(float(max(1e-3, seconds - evaluation)), min(config.positions, positions), updates, interval, texts)

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        simulated = f"a simulation on {self.held_out} texts every {self.interval}" if self.held_out else "no simulation"
        return (
            f"about {self.updates} updates of at most {self.positions} positions fit into {self.seconds:.0f} s, with "
            + simulated
        )

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The configuration that the run follows."""
        return replace(
            config,
            minutes=self.seconds / 60,
            positions=self.positions,
            updates=self.updates,
            warmup=min(config.warmup, self.updates // 10),
            evaluate_every=self.interval,
        )


class TooSlow(Exception):
    """An evaluation takes more time than there is for it."""


def measure_evaluation(evaluate: Callable[[int], float], texts: int, enough: float) -> tuple[int, float]:
    """Evaluate on more and more texts until it takes long enough: on how many, and the seconds it took.

    (0, 0) if one text is too slow already.

    >>> measure_evaluation(lambda texts: 0.1 * texts, 128, 0.5)
    (8, 0.8)
    """
    size, measured = 1, (0, 0.0)
    with contextlib.suppress(TooSlow):
        while measured[0] < texts and measured[1] < enough:
            measured = size, evaluate(size)
            size = min(8 * size, texts)
    return measured


def learning_rate(config: TrainConfig, update: int, seconds: float = 0.0) -> float:
    """Linear warm-up, then a cosine to zero at the last update, or at the end of the time given.

    >>> [round(learning_rate(TrainConfig(updates=20, warmup=4, lr=1.0), u), 2) for u in (0, 3, 4, 12, 19)]
    [0.25, 1.0, 1.0, 0.5, 0.01]
    >>> [round(learning_rate(TrainConfig(minutes=2, warmup=4, lr=1.0), 9, s), 2) for s in (0, 60, 120)]
    [1.0, 0.5, 0.0]
    """
    warm = min(config.warmup, config.updates // 2)
    if update < warm:
        return config.lr * (update + 1) / warm
    done = (update - warm) / max(1, config.updates - warm)
    if config.minutes is not None:
        done = min(1.0, seconds / (60 * config.minutes))
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
