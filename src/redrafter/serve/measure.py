"""What steps of the batch itself cost, by number of rows and shape: contenders take turns, plain decoding among them.

And all that is recorded at its first use, used once, so that no request waits for it.
"""

import statistics
import time
from collections.abc import Callable, Sequence

from redrafter.config import SamplingParams, Shape
from redrafter.engine.profile import MARGIN, Choice, Guessed, Stepped
from redrafter.runtime.batch import Batch, sizes_up_to
from redrafter.runtime.prefill import PIECES
from redrafter.runtime.row import Request, Row

TURNS, STEPS = 4, 3
CONTENDERS = 4
"""Shapes timed for each number of rows."""
RECORDED_STEPS, RECORDED_CONTENDERS = 12, 2
"""The same where a step is quick but takes seconds to record."""
Progress = Callable[[str, int, int], None]
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
)
"""One of each kind of sampling that is recorded for itself: greedy, sampled, filtered, with penalties."""


def measure(
    batch: Batch,
    guessed: Sequence[Guessed],
    prompts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> tuple[list[Stepped], list[Choice]]:
    """Steps by number of rows, and the fastest for each. More rows never want a larger shape than fewer did."""
    steps, contenders = (RECORDED_STEPS, RECORDED_CONTENDERS) if batch.recorded else (STEPS, CONTENDERS)
    tokens = {g.shape: g.tokens_per_step for g in guessed}
    left = sorted(tokens, key=lambda s: -s.budget)
    stepped: list[Stepped] = []
    choices: list[Choice] = []
    sizes = sizes_up_to(batch.rows)
    for done, size in enumerate(sizes):
        if progress is not None:
            progress("steps by number of rows", done, len(sizes))
        tried = left[:contenders] if size > 1 else left
        plain, times = time_steps(batch, size, tried, prompts, steps)
        stepped.append(Stepped(size, None, plain))
        stepped += [Stepped(size, shape, ms) for shape, ms in zip(tried, times, strict=True)]
        rates = {shape: tokens[shape] / ms for shape, ms in zip(tried, times, strict=True)}
        best = max(rates, key=lambda s: rates[s])
        worth = rates[best] >= MARGIN / plain
        choices.append(Choice(size, best if worth else None))
        left = [s for s in left if s.budget <= best.budget] if worth else left[-1:]
    return stepped, choices


def prepare(
    batch: Batch,
    shapes: Callable[[int], Sequence[Shape | None]],
    kinds: Sequence[SamplingParams] = KINDS,
    progress: Progress | None = None,
) -> None:
    """Record what requests of these kinds need: `shapes` are those that so many rows may want."""
    assert batch.recorded
    sizes = sizes_up_to(batch.rows)
    for done, size in enumerate(sizes):
        if progress is not None:
            progress("recording steps", done, len(sizes))
        for params in kinds:
            for drafts in (True, False):
                rows = _opened(batch, size, [[0]], batch.context, params, drafts)
                # Of fewer rows too, as far as they take the same step.
                fewer = range(sizes[done - 1] + 1 if done else 1, size + 1)
                for shape in dict.fromkeys(s for n in fewer for s in shapes(n)) if drafts else [None]:
                    _steps(batch, shape, 1, drafts)
                for row in rows:
                    batch.close(row)
    for tokens in sorted({min(n, batch.context - 1) for n in PIECES}):
        row = batch.open(Request(prompt=[0] * tokens, max_new_tokens=1, seed=0), reuses=False)
        batch.read(row, tokens)
        batch.close(row)


def time_steps(
    batch: Batch, size: int, shapes: Sequence[Shape], prompts: Sequence[Sequence[int]], steps: int
) -> tuple[float, list[float]]:
    """ms of a plain step and of one with each shape, `size` rows; told relative to plain in the same turn."""
    everyone: list[Shape | None] = [None, *shapes]
    longest = sum(shape.length + 1 if shape else 1 for shape in everyone)  # tokens that a step of each may bring
    steps = max(1, min(steps, batch.context // (2 * longest)))
    room = batch.context - steps * longest - 1
    rows = _opened(batch, size, prompts, room)
    try:
        for shape in everyone:  # whatever is made at first use
            _steps(batch, shape, 1)
        turns = []
        for _ in range(TURNS):
            if max(row.known for row in rows) > room:
                for row in rows:
                    batch.close(row)
                rows = _opened(batch, size, prompts, room)
            turns.append([_steps(batch, shape, steps) for shape in everyone])
    finally:
        for row in rows:
            batch.close(row)
    plain = statistics.median(turn[0] for turn in turns)
    return plain, [plain * statistics.median(t[i] / t[0] for t in turns) for i in range(1, len(everyone))]


def _opened(
    batch: Batch,
    size: int,
    prompts: Sequence[Sequence[int]],
    room: int,
    params: SamplingParams | None = None,
    drafts: bool = True,
) -> list[Row]:
    """Rows that are ready to step, with prompts of at most `room` tokens."""
    rows = []
    for i in range(size):
        prompt = list(prompts[i % len(prompts)])[: max(1, room)]
        request = Request(prompt=prompt, max_new_tokens=batch.context, seed=i, sampling=params or SamplingParams())
        row = batch.open(request, drafts=drafts)
        while batch.read(row, 512) is None:
            pass
        rows.append(row)
    return rows


def _steps(batch: Batch, shape: Shape | None, count: int, drafts: bool = True) -> float:
    began = time.perf_counter()
    for _ in range(count):
        batch.step(drafts, shape)
    batch.drain()
    return 1000 * (time.perf_counter() - began) / count
