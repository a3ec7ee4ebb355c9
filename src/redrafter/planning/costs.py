"""What a step costs here, in seconds, learned from the steps themselves.

A step is a pass over T tokens, and before it perhaps a draft of some levels. Few numbers are fitted, and there is no
table of shapes. They begin with those of one model on one machine of each kind. The first steps tell how much slower or
faster another model or machine is, and later ones the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrafter.config import require
from redrafter.planning.linear import LinearPrice

SLOTS = 1024
"""KV cache slots that attention reads are counted in thousands."""


@dataclass(frozen=True)
class FirstPrices:
    """What prices begin with, relative to those of one token and of the beginning of a draft."""

    knots: tuple[int, ...]
    """Tokens of a pass from which on another one costs more."""
    passes: tuple[float, ...]
    """Of one token, of another, of another beyond each knot in addition, of a thousand slots, and of what follows on a
    draft."""
    drafts: tuple[float, ...]
    """Of its beginning, a level, each further beam of a level, and the noise of a sampled level."""
    draft: float
    """The beginning of a draft relative to a pass over one token, before a draft was measured."""
    noise: float
    """How far one measurement is usually from the price."""


ON_CPU = FirstPrices(
    knots=(8,),  # reading the weights no longer takes a part of the time of a pass
    passes=(1.0, 0.12, 0.06, 0.15, 0.05),
    drafts=(1.0, 1.0, 0.25, 0.5),
    draft=0.11,
    noise=0.15,
)
"""SmolLM2-135M in 4 bits on AVX-512 cores; those of passes are in docs/experiments.md."""
ON_GPU = FirstPrices(
    knots=(128, 256),
    passes=(1.0, 0.0018, 0.0018, 0.0012, 0.04, 0.02),
    drafts=(1.0, 1.2, 0.006, 0.02),
    draft=0.013,
    noise=0.05,
)
"""A 7B model in bf16 on an H200 (benchmarks/results/gpu_7b.json, serve_gpu.json)."""


class Costs:
    """Seconds of passes and of drafts."""

    def __init__(self, first: FirstPrices = ON_CPU) -> None:
        self.first = first
        self.passes, self.drafts = LinearPrice(first.passes, first.noise), LinearPrice(first.drafts, first.noise)

    @property
    def known(self) -> bool:
        """Whether a pass was measured."""
        return self.passes.known

    def of_pass(self, tokens: int, slots: int = 0, drafted: bool = False) -> float:
        """A pass over so many tokens that reads `slots` of the KV cache, and the step around it."""
        return self.passes(self._pass(tokens, slots, drafted))

    def more(self, tokens: int, nodes: int) -> float:
        """What so many nodes add to a pass over so many tokens."""
        seconds = nodes * self.passes.of(1)
        for at, knot in enumerate(self.first.knots, 2):
            beyond = max(0, tokens + nodes - knot) - max(0, tokens - knot)
            seconds += beyond * self.passes.of(at) if beyond else 0.0
        return seconds

    @property
    def after_draft(self) -> float:
        """What a draft adds to a step beside itself and its nodes."""
        return self.passes.of(-1)

    def of_draft(self, rows: int, width: int, levels: float, sampled: int = 0) -> float:
        """A draft of so many levels for `rows` rows, `sampled` of them under noise. Before the first one: a guess."""
        seconds = self.drafts(_draft(rows, width, levels, sampled))
        return seconds if self.drafts.known else seconds * self.first.draft * self.of_pass(1)

    def learn_pass(self, seconds: float, tokens: int, slots: int = 0, drafted: bool = False) -> None:
        self.passes.learn(self._pass(tokens, slots, drafted), seconds)

    def learn_draft(self, seconds: float, rows: int, width: int, levels: int, sampled: int = 0) -> None:
        self.drafts.learn(_draft(rows, width, levels, sampled), seconds)

    def saved(self) -> dict[str, tuple[float, ...]]:
        """The prices as they are, for `restore`."""
        return {"passes": self.passes.saved(), "drafts": self.drafts.saved()}

    def restore(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Begin with prices that were saved. ConfigError, and nothing changes, if they cannot be such prices."""
        require(set(saved) == {"passes", "drafts"}, "its prices are not those of passes and drafts")
        passes, drafts = (LinearPrice(price.first, price.noise) for price in (self.passes, self.drafts))
        passes.restore(saved["passes"])
        drafts.restore(saved["drafts"])
        require(passes.known, "no pass was measured")
        self.passes, self.drafts = passes, drafts

    def _pass(self, tokens: int, slots: int, drafted: bool) -> list[float]:
        beyond = [max(0, tokens - knot) for knot in self.first.knots]
        return [1.0, tokens - 1, *beyond, slots / SLOTS, float(drafted)]


def costs_on(device_type: str) -> Costs:
    """The prices to begin with on this kind of device."""
    return Costs(ON_CPU if device_type == "cpu" else ON_GPU)


def _draft(rows: int, width: int, levels: float, sampled: int) -> list[float]:
    return [1.0, levels, levels * (rows * width - 1), levels * sampled]
