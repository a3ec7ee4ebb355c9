"""Finds the shape that writes most tokens per second on this machine, or that plain decoding does.

A grid of shapes is priced from few measurements: tokens/step by walking along texts that the target wrote; a step's
cost as the drafter's share by (W, L) and the verification's by N. The best few are then measured whole, in turns with
plain decoding, and the fastest is chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.engine import Engine
from redrafter.engine.engine import Runtime
from redrafter.engine.profile import Choice, Drafted, Guessed, Profile, Stepped, Verified, key_of, runtime_on, spelled
from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.train.cost import Effort, Filler, time_steps
from redrafter.train.dataset import Texts
from redrafter.train.openings import own_texts
from redrafter.train.simulate import Walked, read_along

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is, and how much there is."""


@dataclass(frozen=True)
class Plan:
    """What to try, and how long."""

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    texts: int
    tokens: int
    """New tokens in each."""
    coarse: Effort
    whole: Effort
    finalists: int

    def shapes(self, drafter: Drafter) -> list[Shape]:
        """All that make sense, and the drafter's own default."""
        found = [spelled(drafter.default_shape)]
        for width in self.widths:
            for length in self.lengths:
                every = width * length
                # Fewer nodes hold neither W candidates nor L tokens of one of them: a smaller beam finds about as much.
                fitting = [n for n in self.nodes if width + length - 1 <= n <= every]
                # N-grams guess few nodes at most places: a budget has nothing to choose from.
                budgets = [every] if isinstance(drafter, NgramDrafter) else fitting or [every]
                found += [Shape(width=width, length=length, nodes=n) for n in budgets]
        return list(dict.fromkeys(found))


CPU = Plan(
    widths=(1, 2, 3, 4),
    lengths=(1, 2, 3, 4, 5),
    nodes=(1, 2, 3, 4, 5, 7, 9, 12),
    texts=10,
    tokens=64,
    coarse=Effort(openings=2, turns=2, steps=4, seconds=40),
    whole=Effort(openings=4, turns=4, steps=4, seconds=40),
    finalists=4,
)
CPU_QUICK = Plan(
    widths=(1, 2, 3),
    lengths=(2, 3, 4),
    nodes=(3, 5, 7),
    texts=6,
    tokens=48,
    coarse=Effort(openings=1, turns=2, steps=3, seconds=10),
    whole=Effort(openings=2, turns=4, steps=3, seconds=10),
    finalists=2,
)
GPU = Plan(
    widths=(1, 2, 4, 8, 16),
    lengths=(2, 4, 6, 8),
    nodes=(2, 4, 7, 15, 31, 63),
    texts=16,
    tokens=96,
    coarse=Effort(openings=1, turns=3, steps=16, seconds=10),
    whole=Effort(openings=4, turns=4, steps=32, seconds=60),
    finalists=4,
)
GPU_QUICK = Plan(
    widths=(1, 4, 16),
    lengths=(2, 4, 8),
    nodes=(3, 7, 15, 31, 63),
    texts=16,
    tokens=64,
    coarse=Effort(openings=1, turns=2, steps=16, seconds=5),
    whole=Effort(openings=2, turns=3, steps=32, seconds=30),
    finalists=2,
)
NGRAM_WIDTHS, NGRAM_LENGTHS = (1, 2), (2, 4, 7, 10)
RECORDED = 2
"""Finalists where each is compiled for a minute first."""


def _silent(*_: object) -> None:
    """Nobody listens."""


def plan_for(target: Target, drafter: Drafter, runtime: str, quick: bool = False) -> Plan:
    if target.device.type == "cuda":
        plan = GPU_QUICK if quick else GPU
        if runtime_on(target, runtime) == "compiled":
            plan = replace(plan, finalists=RECORDED)
    else:
        plan = CPU_QUICK if quick else CPU
    return replace(plan, widths=NGRAM_WIDTHS, lengths=NGRAM_LENGTHS) if isinstance(drafter, NgramDrafter) else plan


def tune(
    target: Target,
    drafter: Drafter,
    *,
    runtime: Runtime = "auto",
    batches: Sequence[int] = (1,),
    temperature: float = 0.0,
    prompts: Sequence[str] | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure and choose; nothing is saved."""
    if isinstance(drafter, NoDrafter):
        raise ConfigError("without a drafter there is nothing to tune: name one")
    if not batches or min(batches) < 1:
        raise ConfigError(f"batch sizes must be at least 1, got {', '.join(map(str, batches)) or 'none'}")
    plan = plan or plan_for(target, drafter, runtime)
    report = progress or _silent
    report("writing texts", 0, 1)
    plain = Engine(target, NoDrafter(), runtime=runtime)
    texts = own_texts(plain, prompts, count=plan.texts, length=plan.tokens, temperature=temperature)
    profile = Profile(
        key=key_of(target, drafter, runtime),
        name=target.name,
        temperature=temperature,
        guessed=tuple(walked(target, drafter, texts, plan.shapes(drafter), temperature, report)),
    )
    for batch in sorted(set(batches)):
        bench = Bench(target, drafter, runtime, openings(texts, batch, plan), plan, temperature, report)
        profile = bench.confirm(bench.price(profile, batch), batch)
    return profile


def walked(
    target: Target, drafter: Drafter, texts: Texts, shapes: Sequence[Shape], temperature: float, report: Progress
) -> list[Guessed]:
    """tokens/step of every shape along the same texts."""
    alongs = list(read_along(target, drafter.layers, texts))
    result = []
    for done, shape in enumerate(shapes):
        report("tokens/step", done, len(shapes))
        every = [w for along in alongs for w in along.walk(drafter, shape)]
        whole = sum(every, start=Walked(0, 0, (0,) * shape.length))
        result.append(Guessed(shape, temperature, whole.tokens_per_step))
    return result


def openings(texts: Texts, batch: int, plan: Plan) -> list[list[list[int]]]:
    """Batches of texts cut in the middle, where steps are timed: whoever looks back finds something."""
    count = max(plan.coarse.openings, plan.whole.openings)
    rows = [texts.row(i % len(texts)).tolist() for i in range(count * batch)]
    prompts = texts.prompts.tolist()
    cut = [row[: (len(row) + prompts[i % len(texts)]) // 2] for i, row in enumerate(rows)]
    return [cut[i * batch : (i + 1) * batch] for i in range(count)]


@dataclass(frozen=True)
class Bench:
    """Where steps of one batch size are timed."""

    target: Target
    drafter: Drafter
    runtime: Runtime
    openings: list[list[list[int]]]
    plan: Plan
    temperature: float
    report: Progress

    def price(self, profile: Profile, batch: int) -> Profile:
        """Add what verifying and drafting cost for this many rows."""
        shapes = [g.shape for g in profile.guessed]
        by_beam: dict[tuple[int, int], list[int]] = {}
        for shape in shapes:
            by_beam.setdefault((shape.width, shape.length), []).append(shape.budget)
        middle = {beam: sorted(budgets)[len(budgets) // 2] for beam, budgets in by_beam.items()}
        nodes = sorted({shape.budget for shape in shapes})
        tried = [Shape(width=w, length=n, nodes=budget) for (w, n), budget in middle.items()]
        # A compiled step takes long to make; a recorded one is near enough to tell which shapes are worth that.
        runtime: Runtime = "graphs" if runtime_on(self.target, self.runtime) == "compiled" else self.runtime
        makers = [lambda n=n: Engine(self.target, Filler(n, self.drafter), runtime=runtime) for n in nodes]
        makers += [lambda s=s: Engine(self.target, self.drafter, shape=s, runtime=runtime) for s in tried]
        plain, times = self._time(runtime, makers, self.plan.coarse, f"costs, {rows_of(batch)}")
        verified = [Verified(batch, 0, plain)]
        verified += [Verified(batch, n, ms) for n, ms in zip(nodes, times, strict=False)]
        profile = replace(profile, verified=(*profile.verified, *verified))
        drafted = [
            Drafted(batch, s.width, s.length, ms - profile.verify_ms(s.budget, batch))
            for s, ms in zip(tried, times[len(nodes) :], strict=True)
        ]
        return replace(profile, drafted=(*profile.drafted, *drafted))

    def confirm(self, profile: Profile, batch: int) -> Profile:
        """Add whole steps of the best few and of the default, and the choice."""
        ranked = sorted((g.shape for g in profile.guessed), key=lambda s: -profile.expected(s, batch))
        best = list(dict.fromkeys([*ranked[: self.plan.finalists], spelled(self.drafter.default_shape)]))
        makers = [lambda s=s: Engine(self.target, self.drafter, shape=s, runtime=self.runtime) for s in best]
        plain, times = self._time(self.runtime, makers, self.plan.whole, f"the best few, {rows_of(batch)}")
        stepped = [Stepped(batch, None, plain)]
        stepped += [Stepped(batch, s, ms) for s, ms in zip(best, times, strict=True)]
        profile = replace(profile, stepped=(*profile.stepped, *stepped))
        return replace(profile, choices=(*profile.choices, Choice(batch, profile.fastest(batch))))

    def _time(
        self, runtime: Runtime, makers: Sequence[Callable[[], Engine]], effort: Effort, what: str
    ) -> tuple[float, list[float]]:
        """All in turns on a CPU; on a GPU, which is steady but has little room, one after another."""
        plain = Engine(self.target, NoDrafter(), runtime=runtime)
        size = 1 if self.target.device.type == "cuda" else len(makers)
        groups = [makers[i : i + size] for i in range(0, len(makers), size)]
        total, done = len(groups) * effort.openings * effort.turns, 0

        def advance() -> None:
            nonlocal done
            done += 1
            self.report(what, done, total)

        self.report(what, 0, total)
        plains, times = [], []
        for group in groups:
            one, others = time_steps(
                plain, [make() for make in group], self.openings, effort, self.temperature, advance
            )
            plains.append(one)
            times += others
        return sorted(plains)[len(plains) // 2], times


def rows_of(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"
