"""What has happened since the start, counted; and the same in Prometheus' text form."""

import bisect
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from redrafter.config import Shape
from redrafter.engine.exactness import Exactness

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
RECENT = 64
"""Answers that `answer_seconds` looks back on."""


@dataclass
class Histogram:
    """How often a value was at most so large."""

    edges: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.edges, value)] += times
        self.total += value * times

    def lines(self, name: str) -> list[str]:
        so_far, found = 0, []
        for edge, count in zip([*map(str, self.edges), "+Inf"], self.counts, strict=True):
            so_far += count
            found.append(f'{name}_bucket{{le="{edge}"}} {so_far}')
        return [*found, f"{name}_sum {self.total}", f"{name}_count {so_far}"]


@dataclass
class Metrics:
    """One thread writes; readers may see a count before the one beside it."""

    requests: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recalled: int = 0
    remembered: int = 0
    tokens: int = 0
    row_steps: int = 0
    drafting_steps: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    """By shape."""
    step_seconds: float = 0.0
    expected: float = 0.0
    """Guesses that the planner expected its steps to accept."""
    accepted: int = 0
    """Guesses that the steps it planned accepted."""
    depth_tried: Counter[int] = field(default_factory=Counter)
    depth_accepted: Counter[int] = field(default_factory=Counter)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def prompt(self, tokens: int, reused: int) -> None:
        self.prompt_tokens += tokens
        self.reused_tokens += reused
        self.tokens += 1

    def step(
        self,
        shape: Shape | None,
        label: str | None,
        rows: Sequence[tuple[int, int]],
        seconds: float,
        copied: bool = False,
        expected: float = 0.0,
    ) -> None:
        """A step, as its label has it, and for each of its rows tokens gained and how many of them were guessed.

        copied: without a draft, tokens copied from the text were verified. expected: accepted guesses, by its plan; 0:
        nothing was guessed, or nothing planned.
        """
        if expected:
            self.expected += expected
            self.accepted += sum(drafted for _, drafted in rows)
        self.step_seconds += seconds
        self.steps[label or ("copied" if copied else "plain")] += 1
        for tokens, drafted in rows:
            self.tokens += tokens
            self.row_steps += 1
            if shape is not None:
                self.drafting_steps += 1
                for depth in range(1, min(drafted + 1, shape.length) + 1):
                    self.depth_tried[depth] += 1
                    self.depth_accepted[depth] += depth <= drafted

    def ended(self, how: str, seconds: float) -> None:
        self.finished[how] += 1
        if how in ("stop", "length"):
            self.recent.append(seconds)

    def answer_seconds(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else 1.0

    def lines(
        self,
        *,
        waiting: int,
        running: int,
        rows: int,
        slots_used: int,
        slots: int,
        state_copies: int,
        exactness: Exactness | None,
    ) -> list[str]:
        """In Prometheus' text form; the arguments are what holds right now."""
        found: list[str] = []

        def tell(name: str, kind: str, about: str, *values: str) -> None:
            full = f"redrafter_{name}"
            found.extend([f"# HELP {full} {about}", f"# TYPE {full} {kind}"])
            found.extend(f"{full}{value}" if value[0] == "{" else f"{full} {value}" for value in values)

        tell("requests_total", "counter", "Requests taken.", str(self.requests))
        tell("requests_refused_total", "counter", "Requests refused because the queue was full.", str(self.refused))
        ends = ("stop", "length", "cancelled", "failed")
        values = [f'{{reason="{end}"}} {self.finished[end]}' for end in ends]
        tell("answers_finished_total", "counter", "Answers by how they ended.", *values)
        tell("queue_length", "gauge", "Answers that wait for a row.", str(waiting))
        tell("running_rows", "gauge", "Answers being read or written.", str(running))
        tell("rows", "gauge", "Rows there are.", str(rows))
        tell("cache_slots_used", "gauge", "Cache slots that open rows fill.", str(slots_used))
        tell("cache_slots", "gauge", "Cache slots there are.", str(slots))
        about = "Memory that copies of recurrent states take, kept for prompts that begin alike."
        tell("state_copies_bytes", "gauge", about, str(state_copies))
        values = [f'{{promise="{name}"}} {int(name == exactness)}' for name in get_args(Exactness)]
        tell("exactness", "gauge", "1 for what is promised about the tokens of answers.", *values)
        tell("prompt_tokens_total", "counter", "Prompt tokens.", str(self.prompt_tokens))
        tell("prompt_tokens_reused_total", "counter", "Of these, taken over from another row.", str(self.reused_tokens))
        about = "Answers that could copy from an earlier answer to the same prompt."
        tell("answers_recalled_total", "counter", about, str(self.recalled))
        tell("remembered_bytes", "gauge", "Memory that remembered answers take.", str(self.remembered))
        tell("tokens_total", "counter", "Tokens written.", str(self.tokens))
        tell("row_steps_total", "counter", "Steps, counted once for each row in them.", str(self.row_steps))
        tell("step_seconds_total", "counter", "Time spent in steps.", str(self.step_seconds))
        per_step = sum(self.depth_accepted.values()) / self.drafting_steps + 1 if self.drafting_steps else 1.0
        tell("tokens_per_step", "gauge", "Tokens that a step with guesses gave a row.", str(per_step))
        about = "Guesses that the planner expected to be accepted; accepted_planned_total counts those that were."
        tell("accepted_expected_total", "counter", about, str(self.expected))
        tell("accepted_planned_total", "counter", "Guesses accepted in planned steps.", str(self.accepted))
        values = [f'{{shape="{shape}"}} {count}' for shape, count in sorted(self.steps.items())]
        if values:
            tell("steps_total", "counter", "Steps by shape WxL:N.", *values)
        rates = [
            f'{{depth="{depth}"}} {self.depth_accepted[depth] / tried}'
            for depth, tried in sorted(self.depth_tried.items())
        ]
        if rates:
            about = "Of the steps that accepted every guess above, how many accepted one at this depth."
            tell("acceptance", "gauge", about, *rates)
        for name, about, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.first_token),
            ("time_per_token_seconds", "Between tokens of an answer, the first left out.", self.per_token),
        ):
            found.extend([f"# HELP redrafter_{name} {about}", f"# TYPE redrafter_{name} histogram"])
            found.extend(histogram.lines(f"redrafter_{name}"))
        return found
