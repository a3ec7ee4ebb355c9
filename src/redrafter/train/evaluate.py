"""Draft quality, measured by real decoding: tokens/step, acceptance by depth and verified nodes, by category."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrafter.bounds import Count, checked
from redrafter.config import Shape
from redrafter.engine import Engine
from redrafter.engine.request import Completion, Request
from redrafter.errors import ConfigError


@dataclass(frozen=True)
class DraftQuality:
    """Sums over the answers of one category, for one shape and temperature."""

    shape: Shape
    temperature: float
    category: str
    answers: int
    tokens: int
    steps: int
    nodes: int
    reached: tuple[int, ...]
    """reached[d]: steps that accepted more than d tokens. A chain of n-grams may reach below the beam."""

    @property
    def tokens_per_step(self) -> float:
        """Weighted by tokens. The first token of an answer comes from the prompt's pass and does not count."""
        return (self.tokens - self.answers) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float | None]:
        """By depth: the share of steps that accepted a token here, among those that accepted all tokens above.

        None for a depth that no step reached.
        """
        before = (self.steps, *self.reached)
        return [hit / tried if tried else None for hit, tried in zip(self.reached, before, strict=False)]

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / self.steps if self.steps else 0.0


def count(
    completions: Sequence[Completion], categories: Sequence[str], shape: Shape, temperature: float
) -> list[DraftQuality]:
    """One result per category, in order of appearance, and one for `all` if there are several."""
    names = list(dict.fromkeys(categories))
    if len(names) > 1:
        names.append("all")
    result = []
    for name in names:
        own = [c for c, category in zip(completions, categories, strict=True) if name in (category, "all")]
        accepted = [a for c in own for a in c.stats.accepted_per_step]
        result.append(
            DraftQuality(
                shape=shape,
                temperature=temperature,
                category=name,
                answers=len(own),
                tokens=sum(c.stats.tokens for c in own),
                steps=sum(c.stats.steps for c in own),
                nodes=sum(c.stats.nodes for c in own),
                reached=tuple(sum(a > depth for a in accepted) for depth in range(max([shape.length, *accepted]))),
            )
        )
    return result


@checked
def evaluate(
    engine: Engine,
    requests: Sequence[Request],
    categories: Sequence[str],
    shapes: Sequence[Shape],
    batch_size: Count = 8,
    progress: Callable[[int], None] | None = None,
) -> list[DraftQuality]:
    """Decode all requests with each shape. `progress` is called with the size of each finished batch."""
    if not len(requests) == len(categories) > 0:
        raise ConfigError(f"got {len(categories)} categories for {len(requests)} requests: give one for each")
    result = []
    temperature = requests[0].sampling.temperature
    for shape in shapes:
        contender = Engine(engine.target, engine.drafter, shape=shape, rule=engine.rule_config, exact=engine.exact)
        done: list[Completion] = []
        for start in range(0, len(requests), batch_size):
            done += contender.complete(requests[start : start + batch_size])
            if progress is not None:
                progress(len(requests[start : start + batch_size]))
        result += count(done, categories, shape, temperature)
    return result
