"""What a user can set: frozen, keyword-only, checked when made."""

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal

from redrafter.bounds import Bounds, Count, CountOrZero, Positive, Probability, check, check_value, shown
from redrafter.errors import ConfigError, first_line

GammaName = Literal["constant", "heuristic", "confidence"]

Threads = Annotated[int, Bounds(least=1, most=max(64, os.cpu_count() or 1))]
"""More than the machine has are of no use, and thousands end the process."""
MOST_NODES = 4096
"""Of a tree that is searched or verified."""
MOST_GRAMMAR = 2**18
"""Characters of a grammar: bounds the time to compile one."""


@dataclass(frozen=True)
class RuleEntry:
    """What is known of an acceptance rule before its code is imported."""

    make: str
    """Where `core.rules` finds what makes it: `package.module:NAME`."""
    lossless: bool
    about: str


RULES = {
    "seeded": RuleEntry("redrafter.core.rules.seeded:SeededRule", True, "lossless, the text of plain decoding"),
    "rejection": RuleEntry("redrafter.core.rules.rejection:make", True, "lossless in distribution"),
    "typical": RuleEntry("redrafter.core.rules.typical:TypicalRule", False, "lossy"),
}
"""The acceptance rules by their names."""


def require(ok: bool, message: str) -> None:
    """For every configuration: what is wrong, in one line."""
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is guessed in one step."""

    width: Annotated[int, Bounds(least=1, most=1024)] = 4
    """Beam width W: candidates followed at once."""
    length: Annotated[int, Bounds(least=1, most=256)] = 4
    """Beam length L: tokens guessed ahead."""
    nodes: Count | None = None
    """Node budget N: how many of the W·L nodes are verified (all when not given)."""
    until: Annotated[float, Bounds(least=0, below=1)] = field(default=0.0, repr=False)
    """A draft on a CPU ends where every row's best path is less probable than this."""

    def __post_init__(self) -> None:
        check(self)
        visited = self.width * self.length
        require(visited <= MOST_NODES, f"width × length must be at most {MOST_NODES}, got {self.width} × {self.length}")

    @property
    def budget(self) -> int:
        """N, never more than the W·L nodes there are."""
        visited = self.width * self.length
        return visited if self.nodes is None else min(self.nodes, visited)

    @classmethod
    def of(cls, given: "str | Shape") -> "Shape":
        """A shape as it is, or as the command line has it.

        >>> Shape.of("16x5:63")
        Shape(width=16, length=5, nodes=63)
        """
        if isinstance(given, Shape):
            return given
        check_value("shape", given, Shape | str)
        try:
            beam, _, nodes = given.partition(":")
            width, length = beam.split("x")
            return cls(width=int(width), length=int(length), nodes=int(nodes) if nodes else None)
        except ValueError:
            raise ConfigError(f"a shape is written WxL or WxL:N, such as 16x5:63, got {shown(given)}") from None

    @property
    def label(self) -> str:
        """The same way back, its budget spelled out.

        >>> Shape.of("1x5").label
        '1x5:5'
        """
        return f"{self.width}x{self.length}:{self.budget}"


LARGEST, SMALLEST = 1e30, 1e-30
"""Of what logits are multiplied with, divided by or raised by: fp32 has room for the results."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the target chooses a token: penalties, then temperature, then filters, then noise."""

    temperature: Annotated[float, Bounds(least=0, most=LARGEST)] = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: CountOrZero = 0
    """Keep the k most probable tokens (0: all)."""
    top_p: Annotated[float, Bounds(above=0, most=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches p."""
    min_p: Probability = 0.0
    """Keep tokens at least this probable relative to the best one."""
    repetition_penalty: Annotated[float, Bounds(least=SMALLEST, most=LARGEST)] = 1.0
    """Divide (or multiply, if negative) the logits of tokens already in prompt or text."""
    presence_penalty: Annotated[float, Bounds(least=-LARGEST, most=LARGEST)] = 0.0
    """Subtract this from the logits of tokens already in prompt or text."""
    frequency_penalty: Annotated[float, Bounds(least=-LARGEST, most=LARGEST)] = 0.0
    """Subtract this once for each earlier occurrence in prompt or text."""
    logit_bias: Mapping[int, Annotated[float, Bounds(least=-math.inf, most=LARGEST)]] = field(default_factory=dict)
    """Added to the logits of these token ids, before everything else; -inf forbids a token."""

    def __post_init__(self) -> None:
        check(self)
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        forbids = {token: -math.inf for token, value in bias.items() if value < -LARGEST}
        object.__setattr__(self, "logit_bias", bias | forbids)
        cold = 0 < self.temperature < SMALLEST
        require(not cold, f"temperature must be 0 or at least {SMALLEST}, got {self.temperature}")


@dataclass(frozen=True)
class Grammar:
    """What a text must look like. Made by one of the class methods; `engine.grammar` compiles it."""

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    text: str

    def __post_init__(self) -> None:
        check(self, text="grammar")
        size, most = len(self.text), MOST_GRAMMAR
        require(size <= most, f"the grammar has {size} characters and at most {most} are taken: make it smaller")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that a JSON schema describes, written on one line; the schema as a mapping or as JSON text."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema is not JSON: {first_line(error)}") from None
        require(isinstance(found, Mapping), f"a JSON schema must be an object, got {text[:40]}")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A text that the regular expression matches from beginning to end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A Lark grammar (llguidance's dialect) or one in llama.cpp's GBNF."""
        return cls("grammar", text)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> "Grammar":
        """One of these texts."""
        check_value("choices", texts, Sequence[str])
        require(len(texts) > 0 and all(texts), "choices must be one or more texts, none of them empty")
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def of(cls, given: Any) -> "Grammar":
        """A grammar as it is, or a JSON schema as a mapping."""
        if isinstance(given, cls):
            return given
        require(isinstance(given, Mapping), f"grammar must be a Grammar or a JSON schema, got {type(given).__name__}")
        return cls.json_schema(given)


def check_text_options(max_new_tokens: int, stop: Sequence[str] = ()) -> None:
    """Raise ConfigError for a length or a stop string that no text can satisfy."""
    check_value("max_new_tokens", max_new_tokens, Count)
    require("" not in stop, "a stop string is empty: it would end every text at once")


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """Which acceptance rule verifies the guesses, and its constants."""

    name: str = "seeded"
    """One of `RULES`."""
    branching: Annotated[tuple[Annotated[int, Bounds(least=1, most=1024)], ...], Bounds(most=256)] = ()
    """`rejection` only: children drawn per node at each depth (empty: a chain of the beam's length)."""
    epsilon: Positive = 0.3
    """`typical` only: accept above min(epsilon, delta · exp(−entropy))."""
    delta: Positive = 0.09
    """`typical` only."""

    def __post_init__(self) -> None:
        check(self, name="rule")
        require(self.name in RULES, f"rule must be one of {', '.join(RULES)}, got {shown(self.name)}")
        nodes = sum(accumulate(self.branching, operator.mul))
        require(nodes <= MOST_NODES, f"branching may draw at most {MOST_NODES} nodes, got {shown(self.branching)}")
        require(
            not self.branching or self.name == "rejection",
            f"branching belongs to the rejection rule, not to {self.name}",
        )

    @property
    def lossless(self) -> bool:
        """Whether the text is the target's own: token for token (`seeded`) or in distribution (`rejection`)."""
        return RULES[self.name].lossless


@dataclass(frozen=True, kw_only=True)
class Gamma:
    """How many tokens a draft model guesses ahead in each step, never more than the beam's length."""

    name: GammaName = "constant"
    """`constant`: always the beam's length; `heuristic`: two more after a step that accepted all, one less after any
    other; `confidence`: a guess that the draft model itself thinks less probable than the threshold is the last."""
    first: Count = 5
    """`heuristic` only: how many in a row's first step."""
    threshold: Probability = 0.4
    """`confidence` only."""

    def __post_init__(self) -> None:
        check(self, name="gamma", first="gamma's first length", threshold="gamma's threshold")

    @classmethod
    def of(cls, text: str) -> "Gamma":
        """As the command line has it, with its constant or without.

        >>> Gamma.of("heuristic:7").first, Gamma.of("confidence").threshold
        (7, 0.4)
        """
        check_value("gamma", text, str)
        name, _, constant = text.partition(":")
        try:
            if constant and name == "heuristic":
                return cls(name="heuristic", first=int(constant))
            if constant and name == "confidence":
                return cls(name="confidence", threshold=float(constant))
        except ValueError:
            raise ConfigError(f"gamma's constant must be a number, got {shown(text)}") from None
        return cls(name=text)  # type: ignore[arg-type]
