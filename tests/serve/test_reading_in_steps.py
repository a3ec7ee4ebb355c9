"""Prompts that the passes of steps read: none is forgotten, and no pass is given more than it has room for."""

from typing import Any

import pytest
import torch

from redrafter import Engine
from redrafter.drafters import NoDrafter
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import AT_ONCE, MOST
from redrafter.serve.scheduler import Scheduler
from redrafter.targets import Target
from tests.helpers.scheduling import Listener, jobs_of, make, run
from tests.helpers.zoo import make_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model("llama", torch.float32))


def ask(scheduler: Scheduler, prompt: list[int], tokens: int, **options: Any) -> tuple[Listener, list[int]]:
    """Submit a request: who hears its answer, and what the answer must be."""
    plain = Engine(scheduler.batch.target, NoDrafter())
    asked = plain.requests([prompt], max_new_tokens=tokens, seed=len(prompt), ignore_eos=True)
    ((job, heard),) = jobs_of(scheduler.batch.target, asked, **options)
    scheduler.submit([job])
    return heard, plain.complete(asked)[0].tokens


def test_a_prompt_is_not_forgotten_where_a_step_waits_for_others(target: Target) -> None:
    """Log-probabilities are read at once: the step that would read the prompt only waits for the one under way."""
    scheduler = make(target, recorded=True)
    assert scheduler.batch.reads_in_steps
    answers = [ask(scheduler, [1, 2], 30)]
    for _ in range(4):
        scheduler.turn()
    assert scheduler.batch.flights
    answers.append(ask(scheduler, [*range(1, 20)], 5, logprobs=2))
    run(scheduler)
    assert [heard.tokens for heard, _ in answers] == [tokens for _, tokens in answers]


def test_a_large_chunk_reads_no_more_than_a_pass_has_room_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(target, recorded=True, chunk=5000, idle_chunk=5000)
    answers = [ask(scheduler, [row, *[7] * 85], 2, reuses=False) for row in range(8)]
    read, step = [], Batch.step

    def stepped(batch: Batch, *given: Any, **more: Any) -> Any:
        read.append(sum(more["pieces"].values()))
        return step(batch, *given, **more)

    monkeypatch.setattr(Batch, "step", stepped)
    run(scheduler)
    assert [heard.tokens for heard, _ in answers] == [tokens for _, tokens in answers]
    assert 0 < max(read) <= MOST < sum(read) == 8 * 85
    assert AT_ONCE == 8
