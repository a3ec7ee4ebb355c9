"""Rows with a logits processor or a grammar beside free ones: what is learned, which rows step together."""

from typing import Any

import pytest
import torch

from redrafter import Engine, Grammar
from redrafter.config import Shape
from redrafter.drafters import NoDrafter
from redrafter.runtime.executor import Executor
from redrafter.serve.scheduler import Scheduler
from redrafter.targets import Target
from tests.helpers.bytes import byte_target
from tests.helpers.letters import make_target
from tests.helpers.scheduling import AnyPolicy, jobs_of, make, run


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_the_chooser_learns_from_free_rows_only(target: Target) -> None:
    scheduler = make(target)
    learned: list[int] = []

    def learn(shape: Shape | None, tokens: float, rows: int) -> None:
        learned.append(rows)

    scheduler.costs.learn = learn  # type: ignore[method-assign]
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 1, "ignore_eos": True}
    request = Engine(target, NoDrafter()).requests([[1, 2]], **options)
    for processors in ((), (lambda ids, scores: scores,)):
        scheduler.submit([jobs_of(target, request, processors=processors)[0][0]])
    run(scheduler)
    assert set(learned) == {1}


def test_a_watched_row_leaves_the_others_recorded_and_few_rows_move(target: Target) -> None:
    """Watched rows step eagerly and apart, and keep their places, so that no step moves a KV cache."""
    scheduler = make(target, recorded=True)
    batch, plain = scheduler.batch, Engine(target, NoDrafter())
    steps: list[tuple[bool, int]] = []
    swaps: list[int] = []
    step, swap = batch.step, batch.state.swap

    def stepped(*given: Any, **options: Any) -> Any:
        results = step(*given, **options)
        steps.extend((flight.launched.late, len(flight.rows)) for flight in batch.flights)
        steps.extend((False, result.size) for result in results if result.kind.watched)
        return results

    batch.step = stepped  # type: ignore[method-assign]
    batch.state.swap = lambda *given: (swaps.append(1), swap(*given))[1]  # type: ignore
    heard, wanted = [], []
    no_a: Any = lambda ids, scores: scores + torch.where(torch.arange(scores.shape[1]) == 3, -50.0, 0.0)  # noqa: E731
    for i, drafts in enumerate((True, True, True, True, True, False)):
        processors = (no_a,) if i in (1, 3) else ()
        request = plain.requests([[1 + i, 2]], max_new_tokens=30, seed=i, temperature=1.0, ignore_eos=True)
        ((job, told),) = jobs_of(target, request, processors=processors, drafts=drafts)
        scheduler.submit([job])
        heard.append(told)
        wanted.append(plain.complete(request, processors)[0].tokens)
    run(scheduler)
    assert [told.tokens for told in heard] == wanted
    assert max(size for recorded, size in steps if not recorded) == 2, "the watched rows alone"
    assert max(size for recorded, size in steps if recorded) == 3, "the free rows that draft"
    assert len(swaps) < 15


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


def test_rows_with_a_grammar_are_recorded_apart_and_few_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    target = byte_target()
    scheduler, plain = make(target, recorded=True), Engine(target, NoDrafter())
    swaps: list[int] = []
    swap = scheduler.batch.state.swap
    scheduler.batch.state.swap = lambda *given: (swaps.append(1), swap(*given))[1]  # type: ignore
    heard, wanted = submit_some_with_grammars(scheduler, plain)
    monkeypatch.setattr(Executor, "run", lambda *_: pytest.fail("a step ran eagerly"))
    run(scheduler)
    assert [told.tokens for told in heard] == wanted
    made = {(*key[:3], key[-1]) for key in scheduler.batch.executor.steps}  # start, stop, drafts, watched
    assert {places[2:] for places in made} == {(True, True), (True, False), (False, True), (False, False)}
    assert (0, 4, True, False) in made, "the free rows that draft"
    assert (4, 6, True, True) in made, "beside them"
    assert len(swaps) < 15
