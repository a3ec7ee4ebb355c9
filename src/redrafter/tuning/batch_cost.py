"""Step costs of the server's running batch, for every number of rows, and the warm-up of its recorded steps."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from redrafter.config import SamplingParams, Shape
from redrafter.errors import ConfigError
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import MOST
from redrafter.runtime.recorded import sizes_up_to
from redrafter.targets.tokenizer import has_chat_template
from redrafter.texts import Texts
from redrafter.tuning.profile import MIN_SPEEDUP, BestShape, Profile, SimulatedShape, StepCost
from redrafter.tuning.prompts import PROMPTS, TunableEngine, target_texts
from redrafter.tuning.simulate import Progress, simulate_shapes
from redrafter.tuning.step_cost import TimingBudget, close_rows, open_rows, run_steps, time_steps

EAGER_BUDGET, RECORDED_BUDGET = TimingBudget(turns=4, steps=3), TimingBudget(turns=4, steps=12)
EAGER_SHAPES, RECORDED_SHAPES = 4, 2
"""Shapes timed for each number of rows. A recorded step is fast, but recording it takes seconds."""
TEXTS, TEXT_TOKENS = 10, 64
"""Number of texts that tokens/step is simulated on, and new tokens in each."""
SAMPLING_KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
)
"""One example of each kind of sampling with a recorded step of its own: greedy, sampled, filtered, penalised."""


class Interrupted(Exception):
    """Somebody else needs the batch; the measurement of this number of rows is repeated later."""


def measure_profile(
    engine: TunableEngine,
    batch: Batch,
    shapes: Sequence[Shape],
    key: dict[str, str],
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> Profile:
    """Simulate tokens/step on texts of the target, then time the steps of this batch.

    No row is open while `progress` runs. `check` is called more often and may raise `Interrupted`; `progress` is then
    called before the measurement goes on.
    """
    texts = written_texts(engine, progress, check)

    def pause() -> None:
        progress("tokens/step", 0, len(shapes))

    simulated = simulate_shapes(engine.target, engine.drafter, texts, shapes, 0.0, progress, pause)
    prompts = [texts.row(i).tolist()[: batch.context // 2] for i in range(len(texts))]
    step_costs, best_shapes = measure_steps(batch, simulated, prompts, progress, check)
    return Profile(
        key=key,
        target_name=engine.target.name,
        temperature=0.0,
        simulated=tuple(simulated),
        step_costs=tuple(step_costs),
        best_shapes=tuple(best_shapes),
    )


T = TypeVar("T")


def repeated(work: Callable[[], T], before: Callable[[], None]) -> T:
    """What the work gives once it is not interrupted; `before` runs before each attempt."""
    while True:
        before()
        with contextlib.suppress(Interrupted):
            return work()


def written_texts(engine: TunableEngine, progress: Progress, check: Callable[[], None] = lambda: None) -> Texts:
    """Texts of the target, one by one where there are prompts for that. A text that is interrupted is begun again."""
    made = []
    write = partial(target_texts, engine, length=TEXT_TOKENS, check=check)
    for i, prompt in enumerate(PROMPTS[:TEXTS] if has_chat_template(engine.target) else ()):
        with contextlib.suppress(ConfigError):  # the target may have nothing to say to one of them
            made.append(repeated(partial(write, [prompt], count=1), partial(progress, "writing texts", i, TEXTS)))
    if not made:
        return repeated(partial(write, None, count=TEXTS), partial(progress, "writing texts", 0, 1))
    rows = [text.row(0).tolist() for text in made]
    return Texts.of(rows, [int(t.prompts[0]) for t in made], [0.0] * len(made), [int(t.seeds[0]) for t in made])


def measure_steps(
    batch: Batch,
    simulated: Sequence[SimulatedShape],
    prompts: Sequence[Sequence[int]],
    progress: Progress = lambda *_: None,
    check: Callable[[], None] = lambda: None,
) -> tuple[list[StepCost], list[BestShape]]:
    """Step costs and the best shape for each number of rows.

    The best shape for more rows is never larger than the best for fewer rows, so larger shapes are not timed again.
    """
    budget, most = (RECORDED_BUDGET, RECORDED_SHAPES) if batch.recorded else (EAGER_BUDGET, EAGER_SHAPES)
    tokens = {row.shape: row.tokens_per_step for row in simulated}
    remaining = sorted(tokens, key=lambda shape: -shape.budget)
    step_costs: list[StepCost] = []
    best_shapes: list[BestShape] = []
    counts = sizes_up_to(batch.rows)
    for done, rows in enumerate(counts):
        shapes = remaining[:most] if rows > 1 else remaining
        plain, times = repeated(
            partial(time_steps, batch, rows, shapes, prompts, budget, check=check),
            partial(progress, "steps by number of rows", done, len(counts)),
        )
        step_costs.append(StepCost(rows, None, plain))
        step_costs += [StepCost(rows, shape, ms) for shape, ms in zip(shapes, times, strict=True)]
        rates = {shape: tokens[shape] / ms for shape, ms in zip(shapes, times, strict=True)}
        best = max(rates, key=lambda shape: rates[shape])
        faster = rates[best] >= MIN_SPEEDUP / plain
        best_shapes.append(BestShape(rows, best if faster else None))
        remaining = [shape for shape in remaining if shape.budget <= best.budget] if faster else remaining[-1:]
    return step_costs, best_shapes


def warm_up(
    batch: Batch,
    shapes: Callable[[int], Sequence[Shape | None]],
    kinds: Sequence[SamplingParams] = SAMPLING_KINDS,
    progress: Progress | None = None,
    chunk: int = MOST,
) -> None:
    """Record every step and pass that requests may need, so that no request waits for a recording.

    `shapes(rows)` are the shapes that may be chosen for this many rows; `chunk` prompt tokens are read in a step.
    """
    assert batch.steps is not None
    counts = sizes_up_to(batch.rows)
    for done, rows in enumerate(counts):
        # Fewer rows run the same recorded step, as long as they exceed the next smaller row count.
        fewer = range(counts[done - 1] + 1 if done else 1, rows + 1)
        chosen = list(dict.fromkeys(s for n in fewer for s in shapes(n)))
        for sampling in kinds:
            if progress is not None:
                progress("recording steps", done, len(counts))
            first = next((shape for shape in chosen if shape is not None), None)
            opened = open_rows(batch, rows, [[0]], batch.context, sampling, first=first)
            for shape in [None, *chosen]:
                run_steps(batch, shape, 1)
            close_rows(batch, opened)
    batch.steps.record_passes(chunk)
