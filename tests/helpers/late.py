"""A world for the planner of recorded steps: they cost what we say, and results come one step late."""

import random
from collections.abc import Callable, Sequence

from redrafter.config import Shape
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.planning.steps import late_planner
from redrafter.runtime.flat_pass import padded_size
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput

TREE = Shape(width=16, length=5, nodes=63)
PLAIN, DRAFT, CATCH_UP = 0.0039, 0.00045, 0.001  # seconds at the cost of a 7B model on an H200


def gpu_pass(tokens: int) -> float:
    """Seconds of a pass, in the proportions of a 7B model on an H200."""
    beyond = max(0, tokens - 128) * 0.0018 + max(0, tokens - 256) * 0.0012
    return PLAIN * (1 + 0.0018 * (tokens - 1) + beyond)


class LateWorld:
    """Rows whose drafts give a row so many tokens by the number of its nodes, and promise what we say.

    gives: accepted nodes of a row, by the tokens written so far and a row's nodes. promises: what drafts say of that,
    by a row's nodes. draft: its seconds. budgets: nodes of all rows. recorded: all steps are, from the beginning.
    """

    def __init__(
        self,
        gives: Callable[[int, float], float],
        *,
        rows: int = 1,
        promises: Callable[[float], float] | None = None,
        draft: float = DRAFT,
        budgets: Sequence[int] = (63,),
        noise: float = 0.0,
        recorded: bool = False,
    ) -> None:
        self.gives, self.promises, self.draft, self.rows = gives, promises or (lambda n: 3.0 * n / 63), draft, rows
        self.noise, self.chance = noise, random.Random(1)
        self.actions = [Action(TREE, nodes, padded_size(rows + nodes)) for nodes in budgets]
        self.load = Load(rows, 0, rows, rows, slots=200 * rows)
        self.recorded: set[Action] = {*self.actions, Action(None, 0, rows)} if recorded else set()
        self.requests = [Row(Request(prompt=[1], max_new_tokens=10**6, seed=i), i) for i in range(rows)]
        self.under_way: list[tuple[Action, StepResult]] = []
        self.launched: list[Action] = []
        self.before: Action | None = None
        self.seconds = 0.0
        self.written = 0.0

    def run(self, planner: LatePlanner, tokens: int) -> "LateWorld":
        """Write a text of so many tokens in each row."""
        planner.begin(1.0)
        self.seconds = self.written = 0.0
        while self.written < tokens:
            planner.begin(0.0)
            self._launch(planner.choose(self.load, self.actions, self.recorded.__contains__))
            if len(self.under_way) > 1:
                self._learn(planner)
        while self.under_way:
            self._learn(planner)
        return self

    def _launch(self, action: Action) -> None:
        self.recorded.add(action)
        self.launched.append(action)
        drafts, nodes = action.shape is not None, action.nodes / self.rows
        accepted = self.gives(int(self.written), nodes) if drafts else 0.0
        parts = (self.draft if drafts else 0.0, gpu_pass(action.tokens))
        resumed = drafts and self.before is not None and self.before.shape is None
        self.before = action
        self.written += 1 + accepted
        self.seconds += sum(parts) + CATCH_UP * resumed
        factor = 50 if self.chance.random() < self.noise else 1
        promised = [self.promises(a.nodes / self.rows) for a in self.actions] if drafts and self.promises else []
        gained = [
            (row, RowOutput([7] * (1 + int(accepted)), drafted=accepted, steps=1, promised=promised))  # type: ignore[arg-type]
            for row in self.requests
        ]
        seen = (parts[0], factor * parts[1])
        seconds = sum(seen) + CATCH_UP * resumed
        result = StepResult(action.shape, gained, self.rows, seconds, tokens=action.tokens, parts=seen)
        self.under_way.append((action, result))

    def _learn(self, planner: LatePlanner) -> None:
        action, result = self.under_way.pop(0)
        at = len(self.launched) - len(self.under_way) - 1
        resumed = at > 0 and self.launched[at - 1].shape is None
        planner.learn(self.load, action, result, [each.nodes for each in self.actions], resumed)

    @property
    def slowdown(self) -> float:
        """Against plain steps alone."""
        return self.seconds / (self.written * gpu_pass(self.rows))

    def plain(self, last: int = 10**6) -> int:
        """Plain ones of the last steps."""
        return sum(action.shape is None for action in self.launched[-last:])


def planner() -> LatePlanner:
    return late_planner(TREE)
