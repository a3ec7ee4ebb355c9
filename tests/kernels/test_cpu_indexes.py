"""Indexes outside their tensors: each compiled function that takes any raises one line, and runs nothing."""

import pytest
import torch

from redrafter.core.flat import Piece, of_pieces
from redrafter.drafters.recurrent.drafter import RecurrentState
from redrafter.errors import ConfigError
from redrafter.kernels.cpu import library, ops
from redrafter.kernels.cpu.block import Block
from redrafter.kernels.cpu.matrices import Floats
from redrafter.kernels.cpu.packed import PackedMatrix
from redrafter.kernels.tree_attention.naive import INDEX, NEWEST, PLACE, POSITION, SLOT, TOKEN
from tests.drafters.recurrent.test_compiled import ROWS, drafter
from tests.helpers.zoo import VOCAB
from tests.targets.cpu.test_packed import packed

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")

FAR = (-1, 10**12, -(2**63), 2**63 - 1)
SLOTS = 7


def take_rows(_):
    matrix = PackedMatrix(Floats(torch.randn(VOCAB, 32).numpy()))
    return [(lambda index: matrix.take(torch.tensor([0, index])), VOCAB - 1)], ()


def run_pass(_):
    model = packed("llama").packed
    cache = [(torch.zeros(2, 2, SLOTS, 16), torch.zeros(2, 2, SLOTS, 16)) for _ in range(model.layer_count)]
    turns = [(torch.ones(5, 8), torch.ones(5, 8))]

    def run(column=TOKEN, value=0, index=0, newest=NEWEST, **options):
        lines = of_pieces([Piece(0, index, [0])], 4, newest=newest).lines
        lines[0, column] = value
        return model.run(lines, cache, turns, **options)

    return [
        (lambda index: run(TOKEN, index), VOCAB - 1),
        (lambda index: run(POSITION, index), 4),
        (lambda index: run(PLACE, index), 1),
        (lambda index: run(SLOT, index), SLOTS - 1),
        (lambda index: run(INDEX, index, newest=1), SLOTS - 1),
        (lambda index: run(-1, index), SLOTS - 1),
        (lambda index: run(-2, index, index=1), SLOTS - 1),
        (lambda index: run(kept=torch.tensor([index])), 0),
    ], cache[0]


def recurrent(monkeypatch):
    made = drafter(monkeypatch)
    return made.compiled, RecurrentState(made.net.context(torch.randn(ROWS, 64)), torch.randn(ROWS, 2, 32, 32))


def run_draft(monkeypatch):
    model, state = recurrent(monkeypatch)
    last = torch.tensor([1, 2, 3])

    def run(last=last, **options):
        how = {"width": 2, "length": 2, "temperature": torch.ones(ROWS), "noise": None}
        return model.search(state.context, state.memory, last, **how | options)

    def chain(index):
        return torch.tensor([[1, 2, index]]).expand(ROWS, -1), torch.full((ROWS, 3), 0.5)

    return [
        (lambda index: run(torch.tensor([1, 2, index])), VOCAB - 1),
        (lambda index: run(chain=chain(index)), VOCAB - 1),
        (lambda index: run(noise=torch.zeros(ROWS, 2, VOCAB - (index != VOCAB))), VOCAB),
    ], ()


def run_take(monkeypatch):
    model, state = recurrent(monkeypatch)

    def take(token=1, count=4):
        tokens, counts = torch.tensor([[1, 2, 3, token]]).expand(ROWS, -1), torch.tensor([1, 0, count])
        return model.take(torch.randn(ROWS, 4, 64), tokens, counts, state.context, state.memory)

    calls = [(lambda index: take(token=index), VOCAB - 1), (lambda index: take(count=index), 4)]
    return calls, (state.context, state.memory)


def rotate_and_store(_):
    keys, values = torch.zeros(1, 2, SLOTS, 16), torch.zeros(1, 2, SLOTS, 16)
    q, k, turn = torch.randn(1, 1, 64), torch.randn(1, 1, 32), torch.ones(1, 1, 16)

    def store(slot):
        return ops.rotate_and_store(q, k, k, turn, turn, torch.tensor([[slot]]), keys, values)

    return [(store, SLOTS - 1)], (q, keys, values)


def block(_):
    keys, values = torch.zeros(1, 2, SLOTS, 16), torch.zeros(1, 2, SLOTS, 16)
    shapes = {"q": (64, 32), "k": (32, 32), "v": (32, 32), "o": (32, 64), "before": (32,), "after": (32,)}
    shapes |= {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    layer = Block({name: torch.randn(shape) for name, shape in shapes.items()}, {}, 16)
    x, turn = torch.randn(1, 1, 32), torch.ones(1, 1, 16)

    def run(slot=0, seen=SLOTS):
        mask = torch.zeros(1, 1, 1, seen)
        return layer(x, turn, turn, torch.tensor([[slot]]), keys, values, mask)

    calls = [(run, SLOTS - 1), (lambda index: run(seen=SLOTS + (index != SLOTS)), SLOTS)]
    return calls, (keys, values)


def move_path(_):
    cache = torch.randn(1, 2, SLOTS, 16)

    def move(length=1, node=0):
        return ops.move_path(cache, torch.tensor([length]), torch.tensor([[0, node]]))

    return [(lambda index: move(length=index), SLOTS - 2), (lambda index: move(node=index), SLOTS - 2)], (cache,)


FUNCTIONS = (take_rows, run_pass, run_draft, run_take, rotate_and_store, block, move_path)


def test_every_function_that_takes_indexes_is_here():
    assert [function.__name__ for function in FUNCTIONS] == list(library.CHECKED)


@torch.no_grad()
@pytest.mark.parametrize("make", FUNCTIONS)
def test_indexes_outside(make, monkeypatch):
    calls, written = make(monkeypatch)
    before = [x.clone() for x in written]
    for call, last in calls:
        for index in (*FAR, last + 1):
            with pytest.raises((ConfigError, IndexError)) as caught:
                call(index)
            assert "\n" not in str(caught.value)
    assert all(torch.equal(x, y) for x, y in zip(written, before, strict=True)), "nothing was run"
    for call, last in calls:
        call(last)
