"""Rows of models with a recurrent state: they join, are read in pieces, move, leave and reuse prefixes."""

import random
from typing import Any

import pytest

from redrafter import Shape
from redrafter.core.recurrence import RecurrentMemory
from redrafter.runtime import prefixes
from redrafter.runtime.batch import Batch
from redrafter.runtime.prefixes import EVERY, FAR, Prefixes
from redrafter.runtime.row import Request, Row
from redrafter.runtime.state import BatchState
from redrafter.targets import Target
from tests.helpers.hybrids import hybrid
from tests.helpers.zoo import VOCAB, recurrent_drafter
from tests.runtime.test_batch import SHAPES, alone, make_batch, requests, serve


@pytest.fixture(scope="module")
def target() -> Target:
    return hybrid("qwen3.5")


@pytest.mark.parametrize("kind", ["qwen3.5", *(pytest.param(k, marks=pytest.mark.slow) for k in ("jamba", "zaya"))])
def test_rows_that_join_and_leave_write_the_same_texts_as_alone(kind: str) -> None:
    target, chance = hybrid(kind), random.Random(kind)
    every = requests(target, 6, chance)
    assert serve(make_batch(target), every, chance) == dict(enumerate(alone(target, every)))


@pytest.mark.parametrize("name", ["swap", "put_recurrent"])
def test_states_that_are_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Twin: rows move, or go on from a prefix, with keys and values alone."""
    monkeypatch.setattr(prefixes, "EVERY", 4)
    target, chance = hybrid("qwen3.5"), random.Random(3)
    every = requests(target, 6, chance)
    expected = dict(enumerate(alone(target, every)))
    state = chance.getstate()
    assert serve(make_batch(target), every, chance) == expected
    swap = BatchState.swap

    def keys_only(self: BatchState, a: int, b: int, length: int) -> None:
        states = self.cache.recurrent
        self.cache.recurrent = RecurrentMemory()
        swap(self, a, b, length)
        self.cache.recurrent = states

    new: Any = keys_only if name == "swap" else (lambda *_: None)
    monkeypatch.setattr(BatchState, name, new)
    chance.setstate(state)
    assert serve(make_batch(target), every, chance) != expected


def written(batch: Batch, prompt: list[int], new: int, pieces: int) -> tuple[Row, list[int]]:
    row = batch.open(Request(prompt=prompt, max_new_tokens=new, seed=1))
    while row.unread:
        batch.read(row, pieces)
    done = False
    while not done:
        (result,) = batch.step(SHAPES[0])
        done = result.rows[0][1].done
    batch.close(row)
    return row, row.ids[len(prompt) :]


def long_batch(target: Target, kept: int = 3) -> Batch:
    return make_batch(target, recurrent_drafter(target), context=95, rows=1, kept=kept)


@pytest.mark.parametrize("pieces", [512, 64, 17, 1])
def test_a_chats_next_turn_goes_on_from_a_copy_and_writes_the_same(target: Target, pieces: int) -> None:
    chance = random.Random(pieces)
    first = [chance.randrange(VOCAB) for _ in range(70)]
    batch = long_batch(target)
    row, answer = written(batch, first, 6, pieces)
    assert answer == written(long_batch(target), first, 6, 512)[1], "whatever the pieces"
    second = [*row.ids, 5, 6, 7]
    again, turn = written(batch, second, 6, pieces)
    assert again.reused == EVERY, "written text and what is behind the copy are read again"
    assert turn == written(long_batch(target), second, 6, 512)[1]
    assert batch.prefixes.nbytes == len(batch.prefixes.copies) * target.state_of_row().nbytes > 0


def test_no_copy_beyond_the_common_prefix_is_used(target: Target) -> None:
    batch = long_batch(target)
    prompt = [i % VOCAB for i in range(80)]
    written(batch, prompt, 2, 512)
    other = [*prompt[:60], *[3] * 20]
    row, text = written(batch, other, 6, 512)
    assert row.reused == 0
    assert text == written(long_batch(target), other, 6, 512)[1]


def test_copies_are_bounded_and_go_with_their_row(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "EVERY", 8)
    monkeypatch.setattr(prefixes, "FAR", 16)
    batch = long_batch(target, kept=1)
    row, _ = written(batch, list(range(30)), 2, 8)
    assert [length for _, length in batch.prefixes.copies] == [16, 24]
    for start in (7, 8):
        written(batch, [start] * 40, 2, 8)
    assert row not in batch.at
    assert all(other in batch.at for other, _ in batch.prefixes.copies)
    assert len(batch.prefixes.copies) <= batch.prefixes.most == 4
    assert FAR % EVERY == 0


def test_steps_are_eager_where_they_would_be_recorded(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="redrafter"):
        batch = make_batch(target, recorded=True, shapes=[Shape(width=2, length=2)])
    assert not batch.recorded
    assert "not recorded: it has layers with a recurrent state" in caplog.text


def test_a_prompt_is_read_in_the_same_pieces_behind_a_copy(target: Target) -> None:
    made = Prefixes(BatchState(target, recurrent_drafter(target), 1, 8, 1))
    assert [made.piece_size(known, 100) for known in (0, 64, 10)] == [64, 64, 54]
    assert made.piece_size(64, 36) == 36
