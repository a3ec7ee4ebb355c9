"""What a user can set: frozen, keyword-only, checked when made."""

import math
from dataclasses import dataclass, fields
from numbers import Real

from redrafter_mlx.errors import ConfigError


def require(ok: bool, message: str) -> None:
    """For every configuration: what is wrong, in one line."""
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is guessed in one step."""

    width: int = 2  # beam width W: candidates followed at once
    length: int = 3  # beam length L: tokens guessed ahead
    nodes: int | None = None  # node budget N: how many of the W·L nodes are verified (all when not given)

    def __post_init__(self) -> None:
        require(self.width >= 1, f"beam width must be at least 1, got {self.width}")
        require(self.length >= 1, f"beam length must be at least 1, got {self.length}")
        require(self.nodes is None or self.nodes >= 1, f"node budget must be at least 1, got {self.nodes}")

    @property
    def budget(self) -> int:
        """N, never more than the W·L nodes there are."""
        visited = self.width * self.length
        return visited if self.nodes is None else min(self.nodes, visited)

    @classmethod
    def of(cls, text: str) -> "Shape":
        """As the command line has it.

        >>> Shape.of("3x4:7")
        Shape(width=3, length=4, nodes=7)
        """
        try:
            beam, _, nodes = text.partition(":")
            width, length = beam.split("x")
            return cls(width=int(width), length=int(length), nodes=int(nodes) if nodes else None)
        except ValueError:
            raise ConfigError(f"a shape is written WxL or WxL:N, such as 2x3:4, got {text!r}") from None

    @property
    def label(self) -> str:
        """The same way back, its budget spelled out."""
        return f"{self.width}x{self.length}:{self.budget}"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the target chooses a token: penalties, then temperature, then filters, then noise."""

    temperature: float = 0.0  # 0 is greedy; otherwise logits are divided by it
    top_k: int = 0  # keep the k most probable tokens (0: all)
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches p
    min_p: float = 0.0  # keep tokens at least this probable relative to the best one
    repetition_penalty: float = 1.0  # divide (or multiply, if negative) the logits of tokens already in prompt or text
    presence_penalty: float = 0.0  # subtract this from the logits of tokens already in prompt or text
    frequency_penalty: float = 0.0  # subtract this once for each earlier occurrence in prompt or text

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            require(isinstance(value, Real) and math.isfinite(value), f"{f.name} must be a number, got {value!r}")
        require(self.temperature >= 0, f"temperature must be 0 or more, got {self.temperature}")
        whole = isinstance(self.top_k, int) and self.top_k >= 0
        require(whole, f"top_k must be a whole number, 0 (off) or more, got {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        require(self.repetition_penalty > 0, f"repetition_penalty must be positive, got {self.repetition_penalty}")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


SAMPLING = {f.name: f.default for f in fields(SamplingParams)}  # names and defaults of the options
