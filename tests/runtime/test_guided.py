"""Recorded steps in which the host takes part: graphs with grammars, and log-probabilities, between them."""

from typing import Any

import pytest
import torch

from redrafter import Engine, Grammar, RuleConfig, Shape
from redrafter.engine.request import Completion
from redrafter.errors import ConfigError
from redrafter.runtime import recorded_step
from redrafter.runtime.batch import Batch
from redrafter.runtime.eager import EagerSteps
from redrafter.runtime.recorded_step import Exchange
from redrafter.runtime.row import Request
from redrafter.targets import Target
from tests.helpers.bytes import byte_target
from tests.helpers.tape import Tape, taped
from tests.helpers.zoo import recurrent_drafter

SHAPE = Shape(width=3, length=3)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = (("name", SCHEMA), ("name", None), ("yes", Grammar.regex("(name|age)=[a-c]{2,4}( and [0-9]+)?\\.")))


@pytest.fixture(scope="module")
def target() -> Target:
    return byte_target()


@pytest.fixture(autouse=True)
def _tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record on a CPU; numpy and our C++ would go unseen."""
    monkeypatch.setattr(recorded_step, "unrecorded", taped)
    monkeypatch.setattr("redrafter.kernels.commit.runs_cpp", lambda _: False)
    monkeypatch.setattr("redrafter.core.rules.beam_search.argmax", lambda x: x.argmax(-1))


def recorded(target: Target, **options: Any) -> Engine:
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE, runtime="graphs", **options)
    engine.recorded = True
    return engine


def complete(engine: Engine, temperature: float) -> list[Completion]:
    options = {"temperature": temperature, "seed": 5, "max_new_tokens": 40}
    return engine.complete([engine.requests([p], grammar=g, **options)[0] for p, g in ASKED])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_and_without_a_grammar_write_what_plain_decoding_writes(
    target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    eager = Engine(target, recurrent_drafter(target), shape=SHAPE)
    want, usual = complete(eager.plain(), temperature), complete(eager, temperature)
    monkeypatch.setattr(EagerSteps, "launch", lambda *_: pytest.fail("a step ran eagerly"))
    engine = recorded(target)
    for _ in range(2):
        found = complete(engine, temperature)
        assert [c.tokens for c in found] == [c.tokens for c in want]
    assert [c.stats.steps for c in found] == [c.stats.steps for c in usual], "the same guesses, forced tokens included"
    (batch,) = engine._idle
    parts = {len(step.graphs) for step in batch.steps.steps.values() if step is not None}
    assert parts == {4, 3}, "without the host between draft and pass, once the rows with a grammar have ended"


def test_twins_without_the_hosts_work(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [c.tokens for c in complete(recorded(target).plain(), 1.0)]
    send = Exchange.send

    def all_but(lost: torch.dtype) -> Any:
        return lambda self: None if self.on_device.dtype == lost else send(self)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "send", all_but(torch.int32))  # every token is allowed
        with pytest.raises(ConfigError, match="no token to choose"):
            complete(recorded(target), 1.0)
    monkeypatch.setattr(Exchange, "send", all_but(torch.int64))  # the tree of the first step is verified again
    assert [c.tokens for c in complete(recorded(target), 1.0)] != want


def test_plain_rows_and_the_rule_rejection(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    want = complete(Engine(target, recurrent_drafter(target), shape=SHAPE).plain(), 1.0)
    rule = RuleConfig(name="rejection")
    drawn = complete(Engine(target, recurrent_drafter(target), shape=SHAPE, rule=rule), 1.0)
    monkeypatch.setattr(EagerSteps, "launch", lambda *_: pytest.fail("a step ran eagerly"))
    plain = recorded(target).plain()
    plain.recorded = True
    assert [c.tokens for c in complete(plain, 1.0)] == [c.tokens for c in want]
    assert [c.tokens for c in complete(recorded(target, rule=rule), 1.0)] == [c.tokens for c in drawn]


@torch.no_grad()
def test_log_probabilities_are_those_of_eager_steps(target: Target) -> None:
    found = []
    for is_recorded in (False, True):
        batch = Batch(
            target,
            recurrent_drafter(target),
            rows=2,
            context=99,
            shapes=[SHAPE],
            recorded=is_recorded,
            runtime="graphs",
        )
        row = batch.open(Request(prompt=[5, 6, 7], max_new_tokens=9, seed=1), logprobs=2)
        batch.read_all([row])
        told: list[Any] = []
        while not told or not told[-1].done:
            told += [output for result in batch.step(SHAPE) for _, output in result.rows]
        found.append([pair for output in told for token in output.logprobs for pair in token])
        assert batch.recorded == is_recorded
    assert batch.steps is not None
    assert all(kind.guided for kind in batch.steps.steps)
    with pytest.raises(AssertionError, match="one at a time"):  # the host would look at the last step alone
        batch.step(SHAPE, count=2)
    assert [t for t, _ in found[1]] == [t for t, _ in found[0]]
    assert [p for _, p in found[1]] == pytest.approx([p for _, p in found[0]])


def test_twin_a_tape_refuses_to_read_a_value() -> None:
    with Tape() as tape, pytest.raises(RuntimeError, match="cannot wait"):
        int(torch.ones(1).sum())
    assert tape.calls
