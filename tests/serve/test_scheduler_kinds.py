"""Rows with a logits processor or a grammar beside free ones: which steps they share."""

from typing import Any

import pytest
import torch

from redrafter import Engine, Grammar
from redrafter.drafters import NoDrafter
from redrafter.runtime.batch import Batch
from redrafter.runtime.eager import EagerSteps
from redrafter.runtime.row import Row
from redrafter.serve.scheduler import Scheduler
from redrafter.targets import Target
from tests.helpers.bytes import byte_target
from tests.helpers.letters import make_target
from tests.helpers.scheduling import AnyPolicy, jobs_of, make, run


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def count_moves(scheduler: Scheduler) -> list[int]:
    """Grows with each row that changes its place in the KV cache."""
    moves: list[int] = []
    swap = scheduler.batch.state.swap
    scheduler.batch.state.swap = lambda *given: (moves.append(1), swap(*given))[1]  # type: ignore
    return moves


def test_steps_are_recorded_again_once_no_row_has_a_processor(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor computes with logits on the host: all rows of its steps step eagerly, and few rows move."""
    scheduler, plain = make(target, recorded=True), Engine(target, NoDrafter())
    moves = count_moves(scheduler)
    eager: list[list[bool]] = []  # of each step, which rows have a processor
    recorded: list[list[bool]] = []
    heard, wanted = [], []
    no_a: Any = lambda ids, scores: scores + torch.where(torch.arange(scores.shape[1]) == 3, -50.0, 0.0)  # noqa: E731
    for i, drafts in enumerate((True, True, True, True, True, False)):
        processors, tokens = ((no_a,), 15) if i in (1, 3) else ((), 30)
        request = plain.requests([[1 + i, 2]], max_new_tokens=tokens, seed=i, temperature=1.0, ignore_eos=True)
        ((job, told),) = jobs_of(target, request, processors=processors, drafts=drafts)
        scheduler.submit([job])
        heard.append(told)
        wanted.append(plain.complete(request, processors)[0].tokens)
    step, launch = EagerSteps.launch, Batch._launch

    def stepped(steps: EagerSteps, rows: list[Row], *given: Any) -> Any:
        eager.append([row.processor is not None for row in rows])
        return step(steps, rows, *given)

    def launched(batch: Batch, *given: Any) -> Any:
        recorded.append([row.processor is not None for row in batch.live])
        return launch(batch, *given)

    monkeypatch.setattr(EagerSteps, "launch", stepped)
    monkeypatch.setattr(Batch, "_launch", launched)
    run(scheduler)
    assert [told.tokens for told in heard] == wanted
    assert min(len(eager), len(recorded)) > 2
    assert all(map(any, eager))
    assert not any(map(any, recorded))
    assert max(map(len, eager)) == 6
    assert max(map(len, recorded)) == 4
    assert len(moves) < 15


def submit_some_with_grammars(scheduler: Scheduler, plain: Engine) -> tuple[list[Any], list[list[int]]]:
    """What clients hear, and the tokens that plain decoding writes."""
    heard, wanted = [], []
    for i, drafts in enumerate((True, True, True, True, True, False, False)):
        grammar = Grammar.regex("[a-f]{9,12}(yes|no)") if i in (1, 3, 5) else None
        options: dict[str, Any] = {"max_new_tokens": 30, "seed": i, "temperature": 1.0, "grammar": grammar}
        request = plain.requests([[9 + i, 8]], **options)
        ((job, told),) = jobs_of(plain.target, request, drafts=drafts)
        scheduler.submit([job])
        heard.append(told)
        wanted.append(plain.complete(request)[0].tokens)
    return heard, wanted


def test_rows_with_a_grammar_beside_free_ones_under_a_policy() -> None:
    target, policy = byte_target(), AnyPolicy()
    scheduler = make(target, policy=policy)
    heard, wanted = submit_some_with_grammars(scheduler, Engine(target, NoDrafter()))
    run(scheduler)
    assert [told.tokens for told in heard] == wanted
    assert policy.planned == {"plain", "copied", "drafted"}


def test_rows_with_a_grammar_share_recorded_steps_with_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    target = byte_target()
    scheduler, plain = make(target, recorded=True), Engine(target, NoDrafter())
    moves = count_moves(scheduler)
    heard, wanted = submit_some_with_grammars(scheduler, plain)
    monkeypatch.setattr(EagerSteps, "launch", lambda *_: pytest.fail("a step ran eagerly"))
    run(scheduler)
    assert [told.tokens for told in heard] == wanted
    assert scheduler.batch.steps is not None
    made = {(kind.rows, kind.shape is not None, kind.guided) for kind in scheduler.batch.steps.steps}
    assert {(drafts, guided) for _, drafts, guided in made} >= {(True, True), (True, False)}
    assert max(rows for rows, _, guided in made if guided) == 8, "all rows, those without a grammar too"
    assert max(rows for rows, _, guided in made if not guided) <= 4, "the free rows, once the others have ended"
    assert len(moves) < 15
