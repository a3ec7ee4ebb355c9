"""Load for tests of equality: requests with mixed parameters, some cancelled, under all shapes in turn."""

import random
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import first_turns
from redrafter.config import Shape
from redrafter.engine import Engine
from redrafter.engine.request import Request
from redrafter.planning.steps import FixedSteps
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Scheduler

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": {198: -5.0}},
    {"stop": ["\n\n", " the"]},
]
SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly and to the point."}


class EveryShape(FixedSteps):
    """Chooses the shapes in turn by the number of rows: this script tests equality, not speed."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__(None)
        self.all: list[Shape | None] = [*shapes, None]

    def choose(self, rows: int) -> Shape | None:
        return self.all[rows % len(self.all)]


class MixedLoad:
    """Requests of all KINDS in turn, every second one with a system prompt, most of them drafting."""

    def __init__(self, engine: Engine, questions: Path, count: int, tokens: int) -> None:
        self.chance = random.Random(0)
        self.requests: list[Request] = []
        self.jobs: list[Job] = []
        self.answers: list[list[int]] = []
        for i, messages in enumerate(first_turns(questions, count)):
            length = self.chance.randint(min(4, tokens), tokens)
            options = KINDS[i % len(KINDS)] | {"max_new_tokens": length, "seed": i}
            self.requests += engine.requests([[SYSTEM, *messages] if i % 2 else messages], **options)
            answer: list[int] = []
            self.answers.append(answer)

            def listener(event: Event, answer: list[int] = answer) -> None:
                if event.part is not None:
                    answer += event.part.tokens

            drafts = self.chance.random() < 0.85
            self.jobs.append(Job(self.requests[-1], listener, tokenizer=engine.target.tokenizer, drafts=drafts))

    def run(self, scheduler: Scheduler, cancelled: float, seconds: float) -> list[int]:
        """Submit all at once, cancel a share of them within some seconds; the indices of the finished ones."""
        scheduler.start()
        for job in self.jobs:
            scheduler.submit([job])
        for job in self.jobs:
            if self.chance.random() < cancelled:
                threading.Timer(self.chance.random() * seconds, scheduler.cancel, [[job]]).start()
        while not scheduler.idle:
            time.sleep(0.05)
        scheduler.stop()
        return [i for i, job in enumerate(self.jobs) if job.writer.finish_reason is not None]
