"""A world for planners: texts whose guesses are right with a given probability, and steps at given prices."""

import itertools
import math
import random
from collections.abc import Iterator

import torch

from redrafter import SamplingParams, Shape
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.runtime.copied import Copied
from redrafter.runtime.host_tree import HostNodes
from redrafter.runtime.row import Request, Row

SHAPE = Shape(width=1, length=5)


def make_row(tokens: list[int], temperature: float = 0.0) -> Row:
    """A row whose prompt is read."""
    return Row(Request(prompt=tokens, max_new_tokens=99, seed=0, sampling=SamplingParams(temperature=temperature)), 0)


def make_planner(copies: bool = True) -> Planner:
    return Planner(SHAPE, copies=copies)


def chain(tokens: list[int], said: float) -> HostNodes:
    """A draft of one path, whose every edge is said to be right with this probability."""
    depths = list(range(1, len(tokens) + 1))
    scores = [depth * math.log(said or 1e-9) for depth in depths]
    return HostNodes([tokens], [[depth - 1 for depth in depths]], [depths], [scores], levels=len(tokens))


class World:
    """skill: how often a drafted token is right if those before are; said: what the drafter says, by default that.

    A pass over T tokens takes 1 + node * (T - 1), a draft fixed + level * levels, both in plain steps of 10 ms.
    """

    def __init__(
        self,
        skill: float,
        said: float | None = None,
        *,
        period: int = 0,
        node: float = 0.15,
        fixed: float = 0.05,
        level: float = 0.08,
    ) -> None:
        self.draw, self.skill, self.said = random.Random(1), skill, skill if said is None else said
        self.node, self.fixed, self.level = node, fixed, level
        self.text: Iterator[int] = itertools.cycle(range(period)) if period else itertools.count(10)
        self.seconds = self.tokens = 0.0

    def run(self, planner: Planner, tokens: int) -> list[Plan]:
        """Write one text."""
        text = [next(self.text) for _ in range(tokens)]
        row, done, plans = make_row(text[:8]), 8, []
        planner.open(row, text[:8], sampled=False)
        while done < tokens:
            plan = planner.choose({row: tokens - done})
            draft, guesses = 0.0, list(plan.copied.get(row, Copied()).tokens)
            if plan.shape is not None:
                guesses = self._drafted(plan, text[done:], row)
                draft = self.fixed + self.level * plan.levels
            right = 0
            while right < min(len(guesses), tokens - done - 1) and guesses[right] == text[done + right]:
                right += 1
            cost = 1 + self.node * plan.nodes
            noise = 0.01 * self.draw.uniform(0.95, 1.05)
            gained = text[done : done + right + 1]
            planner.learn(plan, {row: gained}, (noise * draft, noise * cost))
            done += len(gained)
            self.seconds += cost + draft
            self.tokens += len(gained)
            plans.append(plan)
        planner.close(row)
        return plans

    def _drafted(self, plan: Plan, text: list[int], row: Row) -> list[int]:
        """The drafted tokens that the plan verifies."""
        assert plan.shape is not None
        levels = next((n for n in range(1, 5) if self.said**n < plan.shape.until), 5)
        right = next((i for i in range(levels) if self.draw.random() > self.skill), levels)
        tokens = [*(text[:right] + [-1] * levels)[:right], *[-1] * levels][:levels]
        plan.pack([row], chain(tokens, self.said), torch.tensor([0]))
        return [token for _, token in plan.drafted[row].nodes.values()]

    @property
    def speedup(self) -> float:
        return self.tokens / self.seconds
