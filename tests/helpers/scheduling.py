"""Jobs for a scheduler on a toy target: a batch with several shapes, a random policy, listeners that gather answers."""

import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from redrafter import Shape
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.plan import Plan
from redrafter.planning.planner import Planner
from redrafter.planning.steps import FixedSteps, PlannedSteps, Steps
from redrafter.runtime.batch import Batch
from redrafter.runtime.copied import Copied
from redrafter.runtime.row import Row
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.targets import Target
from tests.helpers.zoo import VOCAB, recurrent_drafter

SHAPES = [Shape(width=3, length=3), Shape(width=2, length=2, nodes=3)]


class Ladder(FixedSteps):
    """Less is guessed the more rows there are."""

    def choose(self, rows: int) -> Shape | None:
        return SHAPES[0] if rows < 3 else SHAPES[1] if rows < 6 else None


class AnyPlanner(Planner):
    """Drafts, chooses among drafted nodes, copies and decodes plainly at random: no decision changes a text."""

    def __init__(self) -> None:
        super().__init__(SHAPES[0], copies=True)
        self.chance, self.planned = random.Random(4), set()

    def choose(self, room: Mapping[Row, int], others: int = 0, slots: int = 0) -> Plan:
        copied = {}
        for row, left in room.items():
            source = self.rows[row].source
            found = None if source is None else source.look_up(left - 1)
            if self.chance.random() < 0.7 and left > 1:
                tokens = list(found.tokens) if found and found.tokens else [self.chance.randrange(VOCAB)]
                copied[row] = Copied(tokens, [self.chance.random() for _ in tokens])
        kind = self.chance.choice(["plain", "copied", "drafted"])
        self.planned.add(kind)
        node = self.chance.choice([0.0, 0.01, 0.1])
        return Plan(
            self.shape if kind == "drafted" else None,
            {} if kind == "plain" else copied,
            price=lambda nodes: node * nodes,
            trust=dict.fromkeys(room, 1.0),
            room={row: left - 1 for row, left in room.items()},
            most=MOST_COPIED,
        )


class AnyPolicy(PlannedSteps):
    """Steps that an `AnyPlanner` plans."""

    def __init__(self) -> None:
        self.planner: AnyPlanner
        super().__init__(AnyPlanner())

    @property
    def planned(self) -> set[str]:
        return self.planner.planned


def make(
    target: Target, rows: int = 8, recorded: bool | None = None, policy: Steps | None = None, **limits: Any
) -> Scheduler:
    drafter = recurrent_drafter(target, memory_heads=2, memory_size=8)
    shapes = [*SHAPES, Shape(width=1, length=MOST_COPIED)]
    batch = Batch(target, drafter, rows=rows, context=90, kept=3, shapes=shapes, recorded=recorded)
    return Scheduler(batch, policy or Ladder(None), Limits(**({"queue": 500, "chunk": 8, "idle_chunk": 16} | limits)))


class Listener:
    """Gathers what is told about one answer."""

    def __init__(self) -> None:
        self.text, self.tokens = "", []
        self.done = threading.Event()
        self.last: Event | None = None

    def __call__(self, told: Event) -> None:
        assert not self.done.is_set(), "nothing is told after the end"
        self.last = told
        if told.part is not None:
            self.text += told.part.text
            self.tokens += told.part.tokens
        if told.final:
            self.done.set()


def jobs_of(target: Target, group: list[Any], **options: Any) -> list[tuple[Job, Listener]]:
    heard = [Listener() for _ in group]
    return [(Job(r, h, tokenizer=target.tokenizer, **options), h) for r, h in zip(group, heard, strict=True)]


def run(scheduler: Scheduler, turns: int = 500) -> None:
    for _ in range(turns):
        if scheduler.idle:
            return
        scheduler.turn()
    pytest.fail("something hangs")
