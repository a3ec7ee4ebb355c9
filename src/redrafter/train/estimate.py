"""What a run will take, from a short measurement on this machine: time, disk and memory; and what other runs gave."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterConfig
from redrafter.drafters.options import DrafterOptions
from redrafter.memory import gib
from redrafter.targets import Target
from redrafter.train.config import DistillConfig, TrainConfig
from redrafter.train.distill import row_bytes, usual_batch
from redrafter.train.least import measure_position
from redrafter.train.run import KEPT
from redrafter.train.schedule import EVALUATION_SHARE, LEAST_POSITIONS
from redrafter.train.task_prompts import ARTICLE_TOKENS, MOST_ARTICLES, TASKS_PER_DOCUMENT
from redrafter.train.text_plan import SHARE, grow, measure_step

ASKED, BEFORE_A_RUN = 5.0, 1.0
"""Seconds that the last of each measurement should take: for --estimate, and at the start of a run."""
ROW = 256
"""Positions of the texts that a measured update learns from."""
ADAM = 3
"""What a checkpoint holds, in networks: the weights and AdamW's two moments."""


@dataclass(frozen=True)
class Recorded:
    """A finished run with SmolLM2-135M-Instruct on one H200; its figure is in benchmarks/results."""

    kind: str
    positions: int
    tokens_per_step: float
    file: str


RECORDED = (
    Recorded("recurrent", 250 * 8192, 2.49, "drafter_smollm2.json"),
    Recorded("recurrent", 2639 * 8192, 4.40, "peers.json"),
    Recorded("recurrent", 7500 * 8192, 4.96, "training_h200.json"),
    Recorded("eagle", 1541 * 8192, 4.10, "peers.json"),
    Recorded("medusa", 4196 * 8192, 2.42, "peers.json"),
)


@dataclass(frozen=True)
class Plan:
    """The run to be estimated."""

    options: DrafterOptions
    config: TrainConfig
    drafter: DrafterConfig
    data: DistillConfig | None = None
    """None: the data is finished."""
    texts: int = 0
    """How many the target answers."""
    prompts: int = 0
    """Those of them whose prompts the user gives."""
    init_from: Path | None = None

    @property
    def weights(self) -> int:
        with torch.device("meta"):
            return sum(weight.numel() for weight in checkpoint.make(self.drafter).parameters())


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes on this machine."""

    rows: int
    """Texts written at once."""
    step: float
    """Seconds in which each of these texts grows by a token."""
    position: float
    """Seconds for each position of an update."""
    peak: int
    """Bytes of a GPU's memory in use at most."""
    seconds: float
    """Taken by measuring."""


def measure(target: Target, plan: Plan, enough: float) -> Measured:
    """Measure larger and larger sizes until each kind of work takes `enough` seconds at once."""
    began = time.perf_counter()
    on_gpu = target.device.type == "cuda"
    rows, step = 0, 0.0
    if plan.texts:
        rows = min((plan.data and plan.data.batch) or usual_batch(target), plan.texts)
        step = measure_step(target, rows, enough)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)

    def position(size: int) -> float:
        length = min(size, ROW) + 2  # the first token is the prompt, and behind the last one nothing is guessed
        return measure_position(target, plan.options, plan.config, -(-size // ROW), length, plan.init_from)

    most = plan.config.positions
    size = most if on_gpu else min(LEAST_POSITIONS, most)  # small updates leave a GPU idle
    seconds = grow(position, size, most, enough)
    peak = torch.cuda.max_memory_allocated(target.device) if on_gpu else 0
    return Measured(rows, step, seconds, peak, time.perf_counter() - began)


def estimate(target: Target, plan: Plan, measured: Measured) -> list[str]:
    """The lines that a user reads."""
    config = plan.config
    learned = config.updates * config.positions
    if config.minutes is not None:
        share = (1 - SHARE if plan.texts else 1) * (1 - EVALUATION_SHARE)
        learned = int(60 * config.minutes * share / measured.position)
        times = [
            f"time: {duration(60 * config.minutes)}, as --minutes says; training learns from about "
            f"{learned / 1e6:.3g} M positions"
        ]
    else:
        times = [
            f"training: about {duration(learned * measured.position)} for {config.updates} updates of "
            f"{config.positions} positions, without simulations"
        ]
        if plan.texts:
            writing = -(-plan.texts // measured.rows) * longest_text(plan) * measured.step
            line = f"data: about {duration(writing)} at most for {plan.texts} texts, {measured.rows} at once"
            times.insert(0, line)
    networks = 4 * plan.weights
    disk = networks * (1 + ADAM * (KEPT + 1)) + (plan.texts * row_bytes(plan.data) if plan.data else 0)
    least = target.weight_bytes + (1 + ADAM) * networks
    return [
        f"estimate for {target.name} on {target.device.type}, from {duration(measured.seconds)} of measuring",
        *times,
        f"disk: {gib(disk)} at most",
        f"memory: {gib(measured.peak)} to train, measured"
        if measured.peak
        else f"memory: {gib(least)} for the weights of model and drafter, and more for the texts of an update",
        recorded(plan, learned),
    ]


def longest_text(plan: Plan) -> float:
    """Steps in which a text is written, on average, if everything written for it is as long as it may be.

    A third of the tasks each: words that begin the user's turn, a question about articles, a conversation.
    """
    if plan.data is None or not plan.texts:
        return 0.0
    turn, answer = plan.data.prompt_tokens, plan.data.max_new_tokens
    task = (MOST_ARTICLES * ARTICLE_TOKENS / TASKS_PER_DOCUMENT + turn + answer) / 3
    own = turn + plan.data.tasks / 100 * task
    return answer + own * (plan.texts - plan.prompts) / plan.texts


def recorded(plan: Plan, learned: int) -> str:
    """What the longest recorded run gave that was not longer than this one."""
    kind = plan.drafter.kind
    runs = sorted((r for r in RECORDED if r.kind == kind), key=lambda r: r.positions)
    if plan.init_from is not None or not runs:
        start = "from another drafter" if plan.init_from is not None else f"of the kind {kind}"
        return f"tokens/step: no run {start} is recorded"
    run = next((r for r in reversed(runs) if r.positions <= learned), runs[0])
    return (
        f"tokens/step: {'about' if run.positions <= learned else 'less than'} {run.tokens_per_step} for a model like "
        f"SmolLM2-135M-Instruct; a recorded run gave that after {run.positions / 1e6:.3g} M positions "
        f"(benchmarks/results/{run.file}), this one has {learned / 1e6:.3g} M"
    )


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.2, 45, 312, 9000, 400_000)]
    ['1 s', '45 s', '5.2 minutes', '2.5 hours', '4.6 days']
    """
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{max(1, round(seconds))} s"
