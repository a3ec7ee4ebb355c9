"""What a step costs here, in seconds, learned from the steps themselves.

A step is a pass over T tokens, and before it perhaps a draft of some levels. Few numbers are fitted, and there is no
table of shapes. They begin with those of SmolLM2-135M in 4 bits on two AVX-512 cores (benchmarks/results/cpu.json). The
first steps tell how much slower or faster another model or machine is, and later ones the rest.
"""

from redrafter.planning.linear import LinearPrice

FEW = 8
"""Tokens of a pass from which on another one may cost more: reading the weights no longer takes a part of its time."""
SLOTS = 1024
"""KV cache slots that attention reads are counted in thousands."""
PASS = (1.0, 0.13, 0.12, 0.15, 0.05)
"""First prices of a pass: of one token, of another, of another beyond the first `FEW` in addition, of a thousand slots,
and of what follows on a draft."""
ANOTHER, BEYOND, AFTER_DRAFT = 1, 2, 4
DRAFT = (1.0, 1.0, 0.25, 0.5)
"""First prices of a draft: its beginning, a level, each further beam of a level, and the noise of a sampled level."""
FIRST_DRAFT = 0.11
"""The beginning of a draft relative to a pass over one token, before a draft was measured."""


class Costs:
    """Seconds of passes and of drafts."""

    def __init__(self) -> None:
        self.passes, self.drafts = LinearPrice(PASS), LinearPrice(DRAFT)

    @property
    def known(self) -> bool:
        """Whether a pass was measured."""
        return self.passes.known

    def of_pass(self, tokens: int, slots: int = 0, drafted: bool = False) -> float:
        """A pass over so many tokens that reads `slots` of the KV cache, and the step around it."""
        return self.passes(_pass(tokens, slots, drafted))

    def more(self, tokens: int, nodes: int) -> float:
        """What so many nodes add to a pass over so many tokens."""
        beyond = max(0, tokens + nodes - FEW) - max(0, tokens - FEW)
        return nodes * self.passes.of(ANOTHER) + beyond * self.passes.of(BEYOND)

    @property
    def after_draft(self) -> float:
        """What a draft adds to a step beside itself and its nodes."""
        return self.passes.of(AFTER_DRAFT)

    def of_draft(self, rows: int, width: int, levels: float, sampled: int = 0) -> float:
        """A draft of so many levels for `rows` rows, `sampled` of them under noise. Before the first one: a guess."""
        seconds = self.drafts(_draft(rows, width, levels, sampled))
        return seconds if self.drafts.known else seconds * FIRST_DRAFT * self.of_pass(1)

    def learn_pass(self, seconds: float, tokens: int, slots: int = 0, drafted: bool = False) -> None:
        self.passes.learn(_pass(tokens, slots, drafted), seconds)

    def learn_draft(self, seconds: float, rows: int, width: int, levels: int, sampled: int = 0) -> None:
        self.drafts.learn(_draft(rows, width, levels, sampled), seconds)


def _pass(tokens: int, slots: int, drafted: bool) -> list[float]:
    return [1.0, tokens - 1, max(0, tokens - FEW), slots / SLOTS, float(drafted)]


def _draft(rows: int, width: int, levels: float, sampled: int) -> list[float]:
    return [1.0, levels, levels * (rows * width - 1), levels * sampled]
