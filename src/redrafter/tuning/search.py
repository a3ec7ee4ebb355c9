"""`tune`: finds the shape that gives the most tokens per second on this machine, or plain decoding if that is faster.

A few measurements estimate the speed of a whole grid of shapes: tokens/step by simulation, and the time of a step as
drafting (by W and L) plus verification (by N). Then the most promising shapes are timed as whole steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from redrafter.bounds import Bounds, Count, NotNegative, check, checked
from redrafter.config import SamplingParams, Shape
from redrafter.core.step import Drafter
from redrafter.drafters.traits import drafts, only_copies
from redrafter.errors import ConfigError
from redrafter.runtime.batch import Batch
from redrafter.runtime.room import check_room
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.tuning.profile import BestShape, DraftCost, Profile, StepCost, VerifyCost, rows_label, with_budget
from redrafter.tuning.prompts import TunableEngine, target_texts
from redrafter.tuning.simulate import Progress, simulate_shapes
from redrafter.tuning.step_cost import DummyDrafter, TimingBudget, context_for, time_steps
from redrafter.tuning.store import profile_key, resolve_runtime

Counts = Annotated[tuple[Count, ...], Bounds(least=1)]


@dataclass(frozen=True)
class SearchGrid:
    """Which shapes to try, and how long to measure them."""

    widths: Counts
    lengths: Counts
    nodes: Counts
    texts: Count
    """Texts to simulate on."""
    tokens: Count
    """New tokens in each text."""
    component_budget: TimingBudget
    step_budget: TimingBudget
    finalists: Count
    """Shapes that are timed as whole steps."""

    def __post_init__(self) -> None:
        check(self)

    def shapes(self, drafter: Drafter) -> list[Shape]:
        """All useful combinations, and the drafter's default shape."""
        found = [with_budget(drafter.default_shape)]
        for width in self.widths:
            for length in self.lengths:
                beam = width * length
                # Fewer nodes hold neither all W candidates nor L tokens of one of them: a smaller beam does as well.
                fitting = [n for n in self.nodes if width + length - 1 <= n <= beam]
                # N-grams draft few nodes at most positions, so a budget has nothing to cut.
                budgets = [beam] if only_copies(drafter) else fitting or [beam]
                found += [Shape(width=width, length=length, nodes=n) for n in budgets]
        return list(dict.fromkeys(found))


CPU_GRID = SearchGrid(
    widths=(1, 2, 3, 4),
    lengths=(1, 2, 3, 4, 5),
    nodes=(1, 2, 3, 4, 5, 7, 9, 12),
    texts=10,
    tokens=64,
    component_budget=TimingBudget(turns=4, steps=4, seconds=40),
    step_budget=TimingBudget(turns=16, steps=4, seconds=40),
    finalists=4,
)
QUICK_CPU_GRID = SearchGrid(
    widths=(1, 2, 3),
    lengths=(2, 3, 4),
    nodes=(3, 5, 7),
    texts=6,
    tokens=48,
    component_budget=TimingBudget(turns=2, steps=3, seconds=10),
    step_budget=TimingBudget(turns=8, steps=3, seconds=10),
    finalists=2,
)
GPU_GRID = SearchGrid(
    widths=(1, 2, 4, 8, 16),
    lengths=(2, 4, 6, 8),
    nodes=(2, 4, 7, 15, 31, 63),
    texts=16,
    tokens=96,
    component_budget=TimingBudget(turns=3, steps=16, seconds=10),
    step_budget=TimingBudget(turns=16, steps=32, seconds=60),
    finalists=4,
)
QUICK_GPU_GRID = SearchGrid(
    widths=(1, 4, 16),
    lengths=(2, 4, 8),
    nodes=(3, 7, 15, 31, 63),
    texts=16,
    tokens=64,
    component_budget=TimingBudget(turns=2, steps=16, seconds=5),
    step_budget=TimingBudget(turns=6, steps=32, seconds=30),
    finalists=2,
)
NGRAM_WIDTHS, NGRAM_LENGTHS = (1, 2), (2, 4, 7, 10)
COMPILED_FINALISTS = 2
"""Finalists with the compiled runtime, which compiles each of them for up to a minute."""


def grid_for(target: Target, drafter: Drafter, runtime: str, quick: bool = False) -> SearchGrid:
    if target.device.type == "cuda":
        grid = QUICK_GPU_GRID if quick else GPU_GRID
        if resolve_runtime("cuda", runtime) == "compiled":
            grid = replace(grid, finalists=COMPILED_FINALISTS)
    else:
        grid = QUICK_CPU_GRID if quick else CPU_GRID
    return replace(grid, widths=NGRAM_WIDTHS, lengths=NGRAM_LENGTHS) if only_copies(drafter) else grid


@checked
def tune(
    engine: TunableEngine,
    *,
    row_counts: Annotated[Sequence[Count], Bounds(least=1)] = (1,),
    temperature: NotNegative = 0.0,
    prompts: Sequence[str] | None = None,
    grid: SearchGrid | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure, and choose the best shape for each number of rows. Nothing is saved."""
    target, drafter = engine.target, engine.drafter
    if not drafts(drafter):
        raise ConfigError("there is nothing to tune without a drafter: name one with --drafter")
    grid = grid or grid_for(target, drafter, engine.runtime)
    shapes = grid.shapes(drafter)
    slack = 1 + max(shape.budget for shape in shapes)
    check_room(target, drafter, shapes, rows=max(row_counts), kept=0, context=grid.tokens, slack=slack)
    report = progress or _no_progress
    report("writing texts", 0, 1)
    texts = target_texts(engine, prompts, count=grid.texts, length=grid.tokens, temperature=temperature)
    profile = Profile(
        key=profile_key(target, drafter, engine.runtime),
        target_name=target.name,
        temperature=temperature,
        simulated=tuple(simulate_shapes(target, drafter, texts, shapes, temperature, report)),
    )
    for rows in sorted(set(row_counts)):
        measurement = _Measurement(
            engine, rows, half_texts(texts), grid, SamplingParams(temperature=temperature), report
        )
        profile = measurement.add_step_costs(measurement.add_component_costs(profile))
    return profile


def half_texts(texts: Texts) -> list[list[int]]:
    """Each prompt with half of its answer. Steps are timed there, where an n-gram drafter finds something to repeat."""
    return [
        texts.row(i).tolist()[: (length + prompt) // 2]
        for i, (length, prompt) in enumerate(zip(texts.lengths.tolist(), texts.prompts.tolist(), strict=True))
    ]


@dataclass(frozen=True)
class _Measurement:
    """Times steps for one number of rows."""

    engine: TunableEngine
    rows: int
    prompts: list[list[int]]
    grid: SearchGrid
    sampling: SamplingParams
    report: Progress

    def add_component_costs(self, profile: Profile) -> Profile:
        """Add what verification costs for each node count, and drafting for each beam."""
        rows, shapes = self.rows, [row.shape for row in profile.simulated]
        budgets: dict[tuple[int, int], list[int]] = {}
        for shape in shapes:
            budgets.setdefault((shape.width, shape.length), []).append(shape.budget)
        beams = [Shape(width=w, length=n, nodes=sorted(found)[len(found) // 2]) for (w, n), found in budgets.items()]
        nodes = sorted({shape.budget for shape in shapes})
        # Compiling takes long. CUDA graphs alone are close enough to tell which shapes are worth compiling.
        runtime = self.engine.runtime
        runtime = "graphs" if resolve_runtime(self.engine.target.device.type, runtime) == "compiled" else runtime
        stage, budget = f"component costs, {rows_label(rows)}", self.grid.component_budget
        dummy = DummyDrafter(self.engine.drafter)
        trees = [dummy.shape(n) for n in nodes]
        groups = len(self._groups(trees)) + len(self._groups(beams))
        counter = _TurnCounter(self.report, stage, groups * budget.turns)
        plain, verified = self._time(dummy, trees, runtime, budget, counter)
        again, drafted = self._time(self.engine.drafter, beams, runtime, budget, counter)
        verify_costs = [VerifyCost(rows, n, ms) for n, ms in zip([0, *nodes], [plain, *verified], strict=True)]
        profile = replace(profile, verify_costs=(*profile.verify_costs, *verify_costs))
        draft_costs = [
            DraftCost(rows, beam.width, beam.length, ms * plain / again - profile.verify_ms(beam.budget, rows))
            for beam, ms in zip(beams, drafted, strict=True)
        ]
        return replace(profile, draft_costs=(*profile.draft_costs, *draft_costs))

    def add_step_costs(self, profile: Profile) -> Profile:
        """Add the measured time of whole steps for the finalists and the default shape, and choose the best."""
        rows, drafter, budget = self.rows, self.engine.drafter, self.grid.step_budget
        ranked = sorted((row.shape for row in profile.simulated), key=lambda s: -profile.tokens_per_second(s, rows))
        shapes = list(dict.fromkeys([*ranked[: self.grid.finalists], with_budget(drafter.default_shape)]))
        counter = _TurnCounter(
            self.report, f"best shapes, {rows_label(rows)}", len(self._groups(shapes)) * budget.turns
        )
        plain, times = self._time(drafter, shapes, self.engine.runtime, budget, counter)
        step_costs = [StepCost(rows, shape, ms) for shape, ms in zip([None, *shapes], [plain, *times], strict=True)]
        profile = replace(profile, step_costs=(*profile.step_costs, *step_costs))
        best = BestShape(rows, profile.fastest_measured(rows))
        return replace(profile, best_shapes=(*profile.best_shapes, best))

    def _groups(self, shapes: Sequence[Shape]) -> list[Sequence[Shape]]:
        """Shapes that take turns in one `time_steps`: all on a CPU, whose speed varies; one at a time on a GPU.

        Shapes that take turns add up in the context that each row needs, and GPU memory is scarce.
        """
        size = 1 if self.engine.target.device.type == "cuda" else len(shapes)
        return [shapes[i : i + size] for i in range(0, len(shapes), size)]

    def _time(
        self, drafter: Drafter, shapes: list[Shape], runtime: str, budget: TimingBudget, counter: "_TurnCounter"
    ) -> tuple[float, list[float]]:
        """ms of a plain step and of a step of each shape."""
        groups = self._groups(shapes)
        longest = max(map(len, self.prompts))
        batch = Batch(
            self.engine.target,
            drafter,
            rows=self.rows,
            context=max(context_for(group, budget.steps, longest) for group in groups),
            kept=0,
            shapes=shapes,
            runtime=runtime,
        )
        ratios: list[float] = []
        plains: list[float] = []
        for group in groups:
            plain, times = time_steps(batch, self.rows, group, self.prompts, budget, self.sampling, counter.advance)
            plains.append(plain)
            ratios += [ms / plain for ms in times]
        middle = sorted(plains)[len(plains) // 2]
        return middle, [middle * ratio for ratio in ratios]


class _TurnCounter:
    """Reports the finished turns of one stage."""

    def __init__(self, report: Progress, stage: str, total: int) -> None:
        self.report, self.stage, self.total, self.done = report, stage, total, 0
        report(stage, 0, total)

    def advance(self) -> None:
        self.done += 1
        self.report(self.stage, self.done, self.total)


def _no_progress(*_: object) -> None:
    """Used when the caller wants no progress reports."""
