"""Steps of a running batch that nobody waits for: they record what requests may need, and tell what steps cost."""

from collections.abc import Callable, Sequence
from typing import Annotated

from redrafter.bounds import Bounds, Count, NotNegative, checked
from redrafter.config import SamplingParams, require
from redrafter.errors import ConfigError
from redrafter.planning.costs import Costs
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.planning.late_steps import LateSteps
from redrafter.planning.steps import FixedSteps, Steps
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import MOST
from redrafter.runtime.recorded import sizes_up_to
from redrafter.runtime.room import check_room
from redrafter.runtime.row import Request
from redrafter.tuning.prompts import TunableEngine, openings_of
from redrafter.tuning.simulate import Progress
from redrafter.tuning.store import Profile, profile_key

SAMPLING_KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
)
"""One example of each kind of sampling with a recorded step of its own: greedy, sampled, filtered, penalised."""
OPENINGS = 4
"""Texts that `tune` writes at least for each number of rows."""
TURNS = 3
"""How often each step of greedy rows is taken: once to be recorded, then to be measured."""


class Sweep(LatePlanner):
    """Takes each action in turn, and learns what it costs for another planner."""

    def __init__(self, planner: LatePlanner) -> None:
        super().__init__(planner.shapes, planner.costs)
        self.turn = self.actions = 0

    def choose(self, load: Load, drafts: Sequence[Action], ready: Callable[[Action], bool]) -> Action:  # noqa: ARG002
        every = [*drafts, Action(None, 0, load.tokens)]  # plain last: before a draft, all results must be known
        self.turn, self.actions = self.turn + 1, len(every)
        return every[(self.turn - 1) % len(every)]


def warm_up(
    batch: Batch,
    steps: Steps,
    kinds: Sequence[SamplingParams] = SAMPLING_KINDS,
    progress: Progress | None = None,
    chunk: int = MOST,
) -> None:
    """Record every step and pass that requests may need, so that no request waits for a recording.

    steps: how the batch will step; its planner learns what steps cost. chunk: prompt tokens that are read in a step.
    """
    counts = sizes_up_to(batch.rows)
    for done, rows in enumerate(counts):
        for sampling in kinds:
            if progress is not None:
                progress("recording steps", done, len(counts))
            requests = [
                Request(prompt=[0], seed=i, max_new_tokens=batch.context, sampling=sampling) for i in range(rows)
            ]
            opened = [batch.open(request, reuses=False) for request in requests]
            if isinstance(steps, LateSteps):
                sweep = Sweep(steps.planner)
                turns, sweeping = TURNS if sampling == kinds[0] else 1, LateSteps(sweep)
                while not sweep.actions or sweep.turn < 1 + turns * sweep.actions:  # the first step drafts nothing
                    sweeping.step(batch, opened)
                    if max(row.known for row in opened) > batch.context // 2:
                        break
            elif isinstance(steps, FixedSteps):
                # Fewer rows run the same recorded step, as long as they exceed the next smaller number of rows.
                fewer = range(counts[done - 1] + 1 if done else 1, rows + 1)
                shapes = list(dict.fromkeys(shape for n in fewer for shape in steps.shapes(n)))
                for shape in (*shapes[:1], *shapes, None):  # the first step drafts nothing
                    batch.step(shape)
            batch.drain()
            for row in opened:
                batch.close(row)
    if batch.steps is not None:
        batch.steps.record_passes(chunk)


@checked
def tune(
    engine: TunableEngine,
    *,
    row_counts: Annotated[Sequence[Count], Bounds(least=1)] = (1,),
    temperature: NotNegative = 0.0,
    prompts: Sequence[str] | None = None,
    tokens: Count = 96,
    progress: Progress | None = None,
) -> Profile:
    """Write texts on a machine that does nothing else, and keep what their steps cost. Nothing is saved.

    On a GPU all steps that a planner may choose take turns.
    """
    planner, target = engine.planner, engine.target
    if planner is None:
        raise ConfigError("there is nothing to tune: name a drafter with --drafter, and no shape, for the rule seeded")
    slack = 1 + max(shape.budget for shape in engine.shapes)
    check_room(target, engine.drafter, engine.shapes, rows=max(row_counts), kept=0, context=tokens, slack=slack)
    report, counts = progress or _no_progress, sorted(set(row_counts))
    most = max(1, target.max_positions // 2)
    openings = [ids[:most] for ids in openings_of(engine, prompts, min(max(counts), OPENINGS))]
    planner.costs = Costs(planner.costs.first)
    if isinstance(planner, LatePlanner):
        engine.planner = Sweep(planner)
    try:
        for done, rows in enumerate(counts):
            report("writing texts", done, len(counts))
            asked = [openings[i % len(openings)] for i in range(max(rows, OPENINGS))]
            options = {"max_new_tokens": tokens, "temperature": temperature, "seed": 0, "ignore_eos": True}
            for _ in engine.run(engine.requests(asked, **options), rows=rows):
                """Each step is measured."""
    finally:
        engine.planner = planner
    require(planner.costs.known, f"no step was measured: write texts of more than {tokens} tokens")
    key = profile_key(target, engine.drafter, engine.runtime)
    return Profile(key=key, target_name=target.name, prices=planner.costs.saved())


def _no_progress(*_: object) -> None:
    """Used when the caller wants no progress reports."""
