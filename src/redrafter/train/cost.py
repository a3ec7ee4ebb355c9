"""What a step costs on this machine: steps of the engine itself, contenders taking turns, plain decoding among them.

A machine that is busy with something else slows down all who take turns alike. So each contender's time is told
relative to plain decoding's in the same turn, and the median over the turns counts.
"""

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from redrafter.config import SamplingParams, Shape
from redrafter.core.rules import Search
from redrafter.core.step import Drafter
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.engine.request import Part, Request
from redrafter.errors import ConfigError

WARM_UP = 2
"""Parts before the clock runs: the prompt's pass, and a step that may still be preparing something."""


class Filler(NoDrafter):
    """Guesses any N tokens, for nothing: its steps cost what verifying N nodes costs."""

    def __init__(self, nodes: int, like: Drafter) -> None:
        self.default_shape = Shape(width=nodes, length=1)
        self.layers = like.layers

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:  # noqa: ARG002
        nodes = search.shape.width
        tokens = torch.arange(nodes + 1, device=last.device).expand(len(last), -1).clone()
        tokens[:, 0] = last
        depths = torch.ones_like(tokens)
        depths[:, 0] = 0
        mask = torch.eye(nodes + 1, dtype=torch.bool, device=last.device)
        mask[:, 0] = True
        return Tree(
            tokens=tokens,
            parents=torch.zeros_like(tokens),
            depths=depths,
            valid=depths >= 0,
            mask=mask.expand(len(last), -1, -1),
            length=1,
        )


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    openings: int
    """How many texts (batches of them, where rows are many) steps are taken behind."""
    turns: int
    """Turns behind each."""
    steps: int
    """Steps in a turn."""
    seconds: float
    """No further turn once steps have taken this long: a busy machine is measured less, not for ever."""


def time_steps(
    plain: Engine,
    contenders: Sequence[Engine],
    openings: Sequence[Sequence[Sequence[int]]],
    effort: Effort,
    temperature: float = 0.0,
    progress: Callable[[], None] | None = None,
) -> tuple[float, list[float]]:
    """ms per step of plain decoding and of each contender. `openings` are batches of token ids to go on from."""
    everyone = [plain, *contenders]
    turns: list[list[float]] = []
    spent = 0.0
    for batch in openings[: effort.openings]:
        if spent > effort.seconds:
            break
        runs = [_begun(engine, batch, effort, temperature) for engine in everyone]
        try:
            for _ in range(effort.turns):
                if spent > effort.seconds:
                    break
                turn = [
                    _timed(run, effort.steps, engine.target.device) for run, engine in zip(runs, everyone, strict=True)
                ]
                if None not in turn:  # else the context is full
                    turns.append([ms for ms in turn if ms is not None])
                    spent += effort.steps * sum(turns[-1]) / 1000
                if progress is not None:
                    progress()
        finally:
            for run in runs:
                run.close()
    if not turns:
        raise ConfigError(f"the context of {plain.target.name} is too short to time steps in: give shorter --prompts")
    usual = statistics.median(turn[0] for turn in turns)
    relative = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(1, len(everyone))]
    return usual, [usual * r for r in relative]


Run = Generator[list[Part], None, None]


def _begun(engine: Engine, batch: Sequence[Sequence[int]], effort: Effort, temperature: float) -> Run:
    """Texts that do not end while they are timed."""
    most = (WARM_UP + effort.turns * effort.steps) * (engine.shape.length + 1)
    sampling = SamplingParams(temperature=temperature)
    requests = [Request(prompt=ids, max_new_tokens=most, seed=row, sampling=sampling) for row, ids in enumerate(batch)]
    run = cast(Run, engine.run(requests))
    for _ in range(WARM_UP):
        next(run, None)
    return run


def _timed(run: Run, steps: int, device: torch.device) -> float | None:
    """ms per step; None if the text ended. A GPU has finished all before the clock starts and before it stops, so a
    step that is launched ahead is counted once."""
    _finish(device)
    began = time.perf_counter()
    for _ in range(steps):
        if next(run, None) is None:
            return None
    _finish(device)
    return 1000 * (time.perf_counter() - began) / steps


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
