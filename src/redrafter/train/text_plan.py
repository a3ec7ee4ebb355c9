"""Which training texts fit into a time limit: the target writes a little, then sizes are chosen from its speed."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from redrafter.config import SamplingParams
from redrafter.errors import ConfigError
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.targets.tokenizer import first_token
from redrafter.train.config import DistillConfig
from redrafter.train.data_folder import settled
from redrafter.train.task_prompts import ARTICLE_TOKENS

log = logging.getLogger(__name__)

SHARE, MOST_SHARE = 1 / 3, 1 / 2
"""Of the minutes for data and training: when the writing of texts should end, and when it must."""
CPU_ROWS, GPU_ROWS = 4, 2048
"""Texts written at once. A CPU writes four nearly as fast as more, and so finishes the first ones sooner."""
GPU_SHARD, CPU_SHARD = 8192, 256
ROUNDS = 2
"""Rounds of texts, each as many as are written at once, that should fit; one must."""
SHORTER_TURNS, SHORTEST_ANSWER = (64, 32), 16
"""Shorter user's turns of the target's own seldom end; shorter answers teach next to nothing."""
PROBE = 64
"""Tokens of each text in the longest measurement."""
SETTLED = ("max_new_tokens", "prompt_tokens", "tasks", "shard")
"""What a plan chooses, and a folder that was begun before has settled."""


class OutOfTime(ConfigError):
    """The time for texts is over."""


@dataclass
class Clock:
    """The time for texts, from `start` on."""

    seconds: float = math.inf
    """When to stop: a further shard is begun only if half of it fits."""
    most: float = math.inf
    """When what is being written is given up."""
    began: float = field(init=False, default=0.0)

    @classmethod
    def of(cls, seconds: float) -> Self:
        """Its part of the seconds for data and training."""
        return cls(SHARE * seconds, MOST_SHARE * seconds)

    def start(self) -> None:
        self.began = time.perf_counter()

    @property
    def passed(self) -> float:
        return time.perf_counter() - self.began

    def check(self) -> None:
        """Raise OutOfTime when it is over."""
        if self.most < math.inf and self.passed > self.most:
            raise OutOfTime(
                f"no training text was finished within {self.most:.0f} s: give more --minutes, or shorter --prompts, "
                "--max-new-tokens or --batch"
            )


def plan_texts(target: Target, folder: Path, config: DistillConfig, seconds: float, own: bool) -> DistillConfig:
    """The configuration with sizes that fit into these seconds; those of the folder where it was begun before.

    own: the target writes the prompts, too.
    """
    gpu = target.device.type == "cuda"
    rows = min(config.batch or (GPU_ROWS if gpu else CPU_ROWS), config.texts)
    config = replace(config, batch=rows)
    if settled(folder, "shard") is not None:
        return replace(config, **{name: settled(folder, name) for name in SETTLED})
    began = time.perf_counter()
    step = measure_step(target, rows, seconds / 20)
    spent = time.perf_counter() - began
    fitted = fit_texts(config, step, seconds - spent, own, GPU_SHARD if gpu else CPU_SHARD, spent)
    log.info("%d texts at once take %.3f s for each token", rows, step)
    return fitted


def fit_texts(
    config: DistillConfig, step: float, seconds: float, own: bool, shard: int, spent: float = 0.0
) -> DistillConfig:
    """The largest sizes of which ROUNDS rounds of texts fit, if every text is as long as it may be.

    step: seconds in which each text of a round grows by a token. spent: seconds that are over already.
    Tasks go first, since they take many passes.

    >>> config = DistillConfig(batch=4)
    >>> for seconds in (10_000, 100, 10):
    ...     fitted = fit_texts(config, 0.05, seconds, own=True, shard=256)
    ...     fitted.tasks, fitted.prompt_tokens, fitted.max_new_tokens, fitted.shard
    (50, 128, 256, 104)
    (0, 128, 256, 4)
    (0, 64, 36, 4)
    """
    rows = config.batch or 1
    least = SHORTEST_ANSWER + (min(SHORTER_TURNS) if own else 0)
    steps = int(seconds / step)
    steps = steps // ROUNDS if steps >= ROUNDS * least else steps
    turn, answer = config.prompt_tokens, config.max_new_tokens
    needed = 5 * turn + 2 * ARTICLE_TOKENS + 2 * answer  # with tasks
    if not own or not config.tasks or needed > steps:
        turns = [t for t in (turn, *SHORTER_TURNS) if t <= turn] if own else [0]
        turn = next((t for t in turns if t + t // 2 <= steps), turns[-1])
        answer = min(answer, steps - turn)
        needed = turn + answer
        config = replace(config, tasks=0 if own else config.tasks)
    if answer < min(SHORTEST_ANSWER, config.max_new_tokens):
        raise ConfigError(
            f"--minutes is too short: a token of {rows} texts takes {step:.2g} s, and {max(0.0, seconds):.1f} "
            f"s are left to write texts; give --minutes {ROUNDS * (spent + step * least) / SHARE / 60:.1g} or more"
        )
    rounds = max(1, int(seconds / 4 / (needed * step)))
    size = config.shard or min(shard, rounds * rows)
    return replace(config, max_new_tokens=answer, prompt_tokens=turn or config.prompt_tokens, shard=size)


def measure_step(target: Target, rows: int, enough: float) -> float:
    """Seconds in which each of so many texts grows by a token; measured until a measurement takes `enough` seconds."""

    def write(tokens: int) -> float:
        began = time.perf_counter()
        _write(target, rows, tokens)
        return (time.perf_counter() - began) / tokens

    write(2)  # what is made once for this number of texts
    return grow(write, 4, PROBE, enough)


def warm_up(target: Target) -> None:
    """Import and make what the first text needs."""
    _write(target, 1, 2)


def _write(target: Target, rows: int, tokens: int) -> None:
    sampling, most = SamplingParams(temperature=1.0), max(1, target.max_positions - 1)
    requests = [
        Request(prompt=[first_token(target, i)], seed=i, max_new_tokens=min(tokens, most), sampling=sampling, eos=())
        for i in range(rows)
    ]
    write_texts(target, requests, rows=rows)


def grow(measure: Callable[[int], float], size: int, most: int, enough: float) -> float:
    """`measure` larger and larger sizes, until a measurement takes long enough; return what it said last.

    >>> grow(lambda size: print(size) or 0.5, 4, 100, 20)
    4
    16
    64
    0.5
    """
    while True:
        value = measure(size)
        if size * value >= enough or size * 4 > most:
            return value
        size *= 4
