"""The least training that is of use: a time that is too short for it is refused before a text is written."""

import math
import time
from pathlib import Path

from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import make_batch
from redrafter.train.config import TrainConfig
from redrafter.train.hidden_states import StateSource
from redrafter.train.objective import make_objective
from redrafter.train.schedule import EVALUATION_SHARE
from redrafter.train.setup import make_net
from redrafter.train.text_plan import SHARE

LEAST_LEARNED = 2000
"""Positions that a new drafter must learn from. Measured with SmolLM2-135M-Instruct on a CPU, in updates of one text
with about 115 positions: 20 updates gave 1.37 simulated tokens/step on held-out texts (16x6:63), 40 gave 1.41. After
the 13 updates of at least 64 positions that two minutes had room for, `compare` found 1.00: no guess was right."""
TRIAL = 66
"""Tokens of the text that the speed is measured with: 64 positions, as many as the smallest update has."""


def check_time(
    target: Target, options: DrafterOptions, config: TrainConfig, left: float, spent: float, own: bool
) -> None:
    """Refuse a time in which a new drafter cannot learn from LEAST_LEARNED positions; on a CPU, since a GPU learns from
    more in a second.

    left: seconds that are left, after those `spent` on loading. own: texts are written in a part of them.
    """
    if target.device.type != "cpu":
        return
    began = time.perf_counter()
    position = measure_position(target, options, config)
    measuring = time.perf_counter() - began
    share = (1 - SHARE if own else 1) * (1 - EVALUATION_SHARE)
    learned = int(max(0.0, left - measuring) * share / position)
    if learned < LEAST_LEARNED:
        needed = spent + measuring + LEAST_LEARNED * position / share
        enough = math.ceil(needed / 60)
        raise ConfigError(
            f"--minutes {config.minutes:g} is too short: a drafter would learn from {learned} positions here, "
            f"and one with fewer than {LEAST_LEARNED} guesses next to nothing; give --minutes {enough} or "
            "more, or go on from another drafter with --init-from"
        )


def measure_position(
    target: Target,
    options: DrafterOptions,
    config: TrainConfig,
    rows: int = 1,
    length: int = TRIAL,
    init_from: Path | None = None,
) -> float:
    """Seconds for each position of an update, by default a small one, that learns from `rows` texts of this length."""
    tokens = [i % target.vocab_size for i in range(min(length, target.max_positions))]
    texts = Texts.of([tokens] * rows, [1] * rows, [0.0] * rows, [0] * rows)
    net = make_net(target, texts, options, config.seed, init_from).to(target.device)
    objective = make_objective(net, target, config)
    every = list(range(rows))
    batch = make_batch(texts, every).to(target.device)
    took = 0.0
    for _ in range(2):  # some things are made once
        began = time.perf_counter()
        loss, _ = objective(batch, StateSource(target, net.config.layers, None).fetch(batch, every))
        loss.backward()
        float(loss.detach())  # waits for the GPU
        took = time.perf_counter() - began
    return took / len(batch.row)
