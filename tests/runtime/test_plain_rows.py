"""Rows that may draft but decode plainly for now: they keep hidden states, and that costs next to nothing on a CPU."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from redrafter import Shape
from redrafter.drafters import NgramDrafter
from redrafter.planning.planner import Planner
from redrafter.planning.steps import PlannedSteps
from redrafter.runtime.batch import Batch
from redrafter.runtime.row import Request
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets import load_target
from tests.helpers.tape import Tape
from tests.helpers.zoo import make_model, recurrent_drafter

SHAPE = Shape(width=2, length=2)


@torch.no_grad()
def test_a_plain_step_moves_no_hidden_states_by_torch() -> None:
    """torch wakes its threads for them, which took 3 % of a step of 32 rows; twin: a step that guesses does."""
    target = load_target(make_model("llama", torch.float32))
    batch = Batch(target, recurrent_drafter(target), rows=3, context=40, shapes=[SHAPE])
    for i in range(3):
        batch.read(batch.open(Request(prompt=[1, 2, 3 + i], max_new_tokens=20, seed=i)), 9)
    batch.step()  # the first of a row guesses nothing
    width = batch.state.history.shape[2]

    def moved(shape: Shape | None) -> list[Any]:
        names = ("gather", "scatter_", "index_put_")
        with Tape(reads=True) as tape:
            batch.step(shape)
        called = [(str(call[0]), call[1][0]) for call in tape.calls]
        return [
            n for n, x in called if any(f".{name}." in n for name in names) and x.dim() == 3 and x.shape[2] == width
        ]

    assert moved(None) == []
    assert moved(SHAPE) != []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_hidden_states_go_to_the_slots_of_their_tokens(dtype: torch.dtype) -> None:
    history, lengths = torch.zeros(2, 9, 4, dtype=dtype), torch.tensor([3, 5])
    inner: Any = SimpleNamespace(layers=(-1,), default_shape=SHAPE)
    rows: Any = SimpleNamespace(lengths=lengths, done=torch.tensor([False, False]))
    hidden = torch.arange(1, 25).view(2, 3, 4).to(dtype)
    nothing: Any = None
    StepDrafter(inner, rows, history, follows=None, guesses=False).advance(None, nothing, hidden)
    assert torch.equal(history[0, 3:6], hidden[0])
    assert torch.equal(history[1, 5:8], hidden[1])
    assert history.count_nonzero() == hidden.numel()
    rows.done[0] = True  # such a row may be read meanwhile: only the last slot, which is no token's, may change
    history.zero_()
    StepDrafter(inner, rows, history, follows=None, guesses=False).advance(None, nothing, hidden)
    assert history[0, :-1].count_nonzero() == 0
    assert torch.equal(history[1, 5:8], hidden[1])


def test_a_drafter_reads_a_text_with_its_first_draft() -> None:
    """To read a prompt took 2 % of a server's time at loads where nothing is drafted."""
    target = load_target(make_model("llama", torch.float32))
    drafter = recurrent_drafter(target)
    begun: list[int] = []
    begin = drafter.begin

    def counted(tokens: torch.Tensor, lengths: torch.Tensor, *rest: Any) -> Any:
        begun.extend(lengths.tolist())
        return begin(tokens, lengths, *rest)

    drafter.begin = counted  # type: ignore[method-assign]
    drafter.advance = mock.Mock(side_effect=drafter.advance)  # type: ignore[method-assign]
    batch = Batch(target, drafter, rows=9, context=40, shapes=[SHAPE])
    policy = PlannedSteps(Planner(None, copies=False))
    rows = [batch.open(Request(prompt=[1, 2, 3 + i], max_new_tokens=30, seed=i)) for i in range(9)]
    batch.read_all(rows)
    policy.step(batch, rows)
    for row in rows:
        policy.open(row)
    for _ in range(4):
        policy.step(batch, rows)
    assert begun == []
    assert not drafter.advance.called
    assert batch.state.rows.state is None
    for row in rows[1:]:
        batch.close(row)
    batch.step(SHAPE)
    batch.step(SHAPE)
    # Of one row, once: all before its last token; and a text of one token, to see how large a state is.
    assert begun == [3 + 4, 1]
    assert drafter.advance.call_count == 3  # for the last token, and after each draft


def test_first_readings_of_many_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts in one padded pass would take the memory of a second batch; twin: where all fit, one pass reads all."""
    target = load_target(make_model("llama", torch.float32))
    for most, passes in ((10, 3), (8192, 1)):
        monkeypatch.setattr("redrafter.runtime.eager.TOKENS_TOGETHER", most)
        drafter = recurrent_drafter(target)
        drafter.begin = mock.Mock(side_effect=drafter.begin)  # type: ignore[method-assign]
        batch = Batch(target, drafter, rows=5, context=40, shapes=[SHAPE])
        for i in range(5):
            batch.read(batch.open(Request(prompt=[1, 2, 3, 4 + i], max_new_tokens=20, seed=i)), 9)
        batch.step(SHAPE)
        batch.step(SHAPE)
        assert drafter.begin.call_count == 1 + passes, "the first time to see how large a state is"
        assert all(call.args[0].numel() <= most for call in drafter.begin.call_args_list)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_drafter_learns_nothing_of_plain_rows_beside_others(recorded: bool) -> None:
    """Its state of a place has room for one text: the texts of all plain rows that ever stood there would not fit."""
    batch = Batch(
        load_target(make_model("llama", torch.float32)),
        NgramDrafter(2, 1),
        rows=2,
        context=30,
        shapes=[SHAPE],
        recorded=recorded,
        runtime="graphs",
    )
    drafting = batch.open(Request(prompt=[7, 8, 7], max_new_tokens=200, seed=0))
    for i in range(3):
        plain = batch.open(Request(prompt=[9], max_new_tokens=28, seed=i), drafts=False)
        while plain.open:
            if not drafting.open:
                drafting = batch.open(Request(prompt=[7, 8, 7], max_new_tokens=200, seed=i))
            batch.read_all([row for row in (drafting, plain) if row.unread])
            for row, output in [pair for result in batch.step(SHAPE) for pair in result.rows]:
                if output.done:
                    batch.close(row)
    state: Any = batch.state.rows.state
    assert state.lengths[plain.place] == 1, "of no text yet"
    assert state.lengths[1 - plain.place] > 3, "twin: of the row that drafts"


def test_plain_rows_and_rows_that_draft_share_one_recorded_step() -> None:
    """And write what each writes alone; a row's first step is of no other kind."""
    target = load_target(make_model("llama", torch.float32))
    prompts, drafts = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [9]], [True, False, True, False]

    def texts(together: bool) -> list[list[int]]:
        batch = Batch(
            target, recurrent_drafter(target), rows=4, context=40, shapes=[SHAPE], recorded=True, runtime="graphs"
        )
        found = []
        for some in [range(4)] if together else [[i] for i in range(4)]:
            rows = [
                batch.open(Request(prompt=prompts[i], max_new_tokens=12, seed=i), drafts=drafts[i], reuses=False)
                for i in some
            ]
            batch.read_all(rows)
            nodes = dict.fromkeys(rows, 0)
            while any(row.open for row in rows):
                for result in batch.step(SHAPE):
                    for row, output in result.rows:
                        nodes[row] += output.nodes
                        if output.done:
                            batch.close(row)
            batch.drain()
            assert [nodes[row] > 0 for row in rows] == [drafts[i] for i in some]
            found += [row.ids for row in rows]
        if together:
            assert batch.steps is not None
            kinds = [(kind.rows, kind.shape) for kind in batch.steps.steps]
            assert kinds.count((4, SHAPE)) == 1
            assert all(shape is None for rows, shape in kinds if rows == 4 and (rows, shape) != (4, SHAPE))
        return found

    assert texts(together=True) == texts(together=False)
