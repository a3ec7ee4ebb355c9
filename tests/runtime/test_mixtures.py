"""Random mixtures in recorded steps, and in those of packed weights: every text is that of plain decoding alone.

A mixture is a running batch in which rows join, are read in pieces, draft trees of 0 to 63 nodes or decode plainly,
follow a guide, are cancelled and leave, in any order.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from redrafter.config import SamplingParams, Shape
from redrafter.core import flat as core_flat
from redrafter.core.flat import Piece
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter, WithNgrams
from redrafter.kernels.cpu import library
from redrafter.kernels.flatten import host
from redrafter.kernels.tree_attention.naive import NEWEST, PLACE
from redrafter.runtime.batch import Batch
from redrafter.runtime.copied import Copied
from redrafter.runtime.guide import Branches
from redrafter.runtime.row import Request, Row
from redrafter.targets import Target
from redrafter.targets.cpu.packed_load import from_module
from redrafter.targets.cpu.packed_target import PackedTarget
from tests.helpers.zoo import VOCAB, make_model, recurrent_drafter

SHAPES = [Shape.of(name) for name in ("1x1:1", "2x2:3", "3x3:7", "4x3:12", "8x4:31", "16x5:63")]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3),
]
REQUESTS, USUAL, MANY = 40, 8, 500


class EvenTokens:
    """A guide that allows even tokens only, and guesses one more."""

    before = None

    def __call__(self, logits: torch.Tensor, tree: Tree) -> torch.Tensor:
        logits[..., 1::2] = -torch.inf
        return logits

    def guess(self, tree: Branches, room: int) -> Branches:
        tokens, parents, place = tree.tokens[:1], [0], {0: 0}
        for node in range(1, len(tree.tokens)):
            if tree.tokens[node] % 2 == 0 and tree.parents[node] in place:
                place[node] = len(tokens)
                tokens, parents = [*tokens, tree.tokens[node]], [*parents, place[tree.parents[node]]]
        children = [token for token, parent in zip(tokens[1:], parents[1:], strict=True) if parent == 0]
        if len(tokens) <= room and 2 not in children:  # below the root, before deeper nodes
            tokens = [tokens[0], 2, *tokens[1:]]
            parents = [0, 0, *(parent + 1 if parent else 0 for parent in parents[1:])]
        return Branches(tokens, parents)

    def mask(self, tree: Branches, words: NDArray[np.int32]) -> None:
        words[:] = 0x55555555

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A request, whether a guide goes with it, and the text that plain decoding writes."""

    request: Request
    guided: bool
    text: list[int]

    @property
    def processor(self) -> Any:
        return EvenTokens() if self.guided else None


def packed() -> Target:
    if library.library() is None:
        pytest.skip("no C++ compiler here")
    own = make_model("llama", torch.float32, head_dim=16)
    return from_module(own, None, "llama", 8, lambda: own)


KINDS = {"recorded": lambda: Target(make_model("llama", torch.float32)), "packed": packed}


@pytest.fixture(scope="module", params=KINDS)
def cases(request: pytest.FixtureRequest) -> tuple[Target, list[Case]]:
    return made_cases(request.param)


@functools.cache
def made_cases(kind: str) -> tuple[Target, list[Case]]:
    target, chance = KINDS[kind](), random.Random(7)
    system, made = [chance.randrange(VOCAB) for _ in range(20)], []
    for i in range(REQUESTS):
        beginning = system if chance.random() < 0.3 else []
        prompt = beginning + [chance.randrange(VOCAB) for _ in range(chance.choice([1, 2, 9, 33]))]
        request = Request(
            prompt=prompt,
            max_new_tokens=chance.randint(1, 24),
            seed=i,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            eos=(11, 23) if i % 3 == 0 else (),
        )
        made.append(Case(request, i % 5 == 4, []))
    return target, [Case(case.request, case.guided, alone(target, case)) for case in made]


def alone(target: Target, case: Case) -> list[int]:
    """Plain decoding in eager steps."""
    batch = Batch(target, NoDrafter(), rows=1, context=90, shapes=(), endings=2, recorded=False)
    row = batch.open(case.request, drafts=False, processor=case.processor)
    batch.read_all([row])
    while True:
        for result in batch.step():
            if result.rows[0][1].done:
                return row.ids[len(case.request.prompt) :]


@pytest.fixture(scope="module")
def batch(cases: tuple[Target, list[Case]]) -> Batch:
    target, _ = cases
    return new_batch(target, WithNgrams(recurrent_drafter(target, memory_heads=2, memory_size=8)))


def new_batch(target: Target, drafter: Any) -> Batch:
    recorded = not isinstance(target, PackedTarget)
    return Batch(target, drafter, rows=5, context=90, kept=2, shapes=SHAPES, endings=2, recorded=recorded)


def mixture(batch: Batch, cases: list[Case], seed: object) -> Iterator[tuple[Case, list[int]]]:
    """One mixture: each case whose text was written to its end, and the text."""
    chance = random.Random(f"mixture {seed}")
    waiting = [chance.choice(cases) for _ in range(chance.randint(1, 9))]
    rows: dict[Row, Case] = {}
    shapes = chance.sample([*SHAPES, None], 3)
    cancel, chunk = chance.choice([0.0, 0.0, 0.05]), chance.choice([3, 16, 64])
    while waiting or rows:
        while waiting and batch.free and chance.random() < 0.6:
            case = waiting.pop()
            rows[batch.open(case.request, drafts=chance.random() < 0.7, processor=case.processor)] = case
        for row in rows:
            if chance.random() < 0.5:
                batch.reuse(row)
        pieces = batch.pieces(chunk) if chance.random() < 0.7 else {}
        if pieces or any(not row.unread for row in rows):
            shape, copied = chance.choice(shapes), {}
            if not batch.recorded:
                guesses = {row: guess(chance, row, rows[row]) for row in rows if row.drafts and row.stepped}
                copied = {row: found for row, found in guesses.items() if found.tokens}
            for result in batch.step(shape, pieces=pieces, copied=copied):
                for row, output in result.rows:
                    assert output.error is None
                    if output.done and row in rows:
                        batch.close(row)
                        yield rows.pop(row), row.ids[len(row.request.prompt) :]
        for row in list(rows):
            if chance.random() < cancel:
                batch.close(row)
                del rows[row]
    batch.drain()


def guess(chance: random.Random, row: Row, case: Case) -> Copied:
    """Tokens as if copied from a text: some follow, some do not, some rows have none."""
    written = len(row.ids) - len(case.request.prompt)
    tokens = case.text[written : written + chance.randrange(18)]
    if tokens and chance.random() < 0.5:
        tokens[chance.randrange(len(tokens))] = chance.randrange(VOCAB)
    return Copied(tokens, [0.5] * len(tokens))


def wrong(batch: Batch, cases: list[Case], seeds: range) -> int:
    """Texts of these mixtures that differ from plain decoding's."""
    return sum(text != case.text for seed in seeds for case, text in mixture(batch, cases, seed))


def test_every_text_is_that_of_plain_decoding(batch: Batch, cases: tuple[Target, list[Case]]) -> None:
    written = [pair for seed in range(USUAL) for pair in mixture(batch, cases[1], seed)]
    assert [text for _, text in written] == [case.text for case, _ in written]
    assert len(written) > 2 * USUAL
    assert batch.reads_in_steps
    if not batch.recorded:
        return
    assert batch.steps is not None
    kinds = [kind for kind, step in batch.steps.steps.items() if step is not None]
    assert len(kinds) == len(batch.steps.steps), "every kind of step was recorded"
    assert {kind.guided for kind in kinds} == {kind.shape is None for kind in kinds} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_mixtures(batch: Batch, cases: tuple[Target, list[Case]], part: int) -> None:
    each = MANY // 10
    assert wrong(batch, cases[1], range(USUAL + part * each, USUAL + (part + 1) * each)) == 0


def neighbours_ancestors(*args: Any) -> torch.Tensor:
    tokens, depths, mask, *others = args
    return host.flatten(tokens, depths, mask.roll(1, 0), *others)


def neighbours_place(*args: Any) -> torch.Tensor:
    tokens, depths, mask, real, lengths, places, *others = args
    return host.flatten(tokens, depths, mask, real, lengths, places.roll(1), *others)


def lines_of_neighbours_ancestors(*args: Any) -> torch.Tensor:
    tokens, depths, mask, *others = args
    return host.lines_of(tokens, depths, mask.roll(1, 0), *others)


def lines_at_neighbours_place(*args: Any) -> torch.Tensor:
    lines = host.lines_of(*args)
    lines[:, PLACE] = lines[:, PLACE].flip(0)
    return lines


def seen_padding(count: int, device: Any = "cpu", newest: int = NEWEST) -> torch.Tensor:
    lines = padding(count, device, newest)
    lines[:, 5:] = 3  # it writes a key, and sees one
    return lines


def late_pieces(pieces: Sequence[Piece], *args: Any, **options: Any) -> core_flat.Flat:
    return of_pieces([replace(piece, begin=piece.begin + 1) for piece in pieces], *args, **options)


padding, of_pieces = host.padding, core_flat.of_pieces


@pytest.mark.parametrize(
    ("kind", "place", "name", "twin"),
    [
        ("recorded", core_flat, "flatten", neighbours_ancestors),
        ("recorded", core_flat, "flatten", neighbours_place),
        ("recorded", host, "padding", seen_padding),
        ("packed", core_flat, "lines_of", lines_of_neighbours_ancestors),
        ("packed", core_flat, "lines_of", lines_at_neighbours_place),
        ("packed", core_flat, "of_pieces", late_pieces),
    ],
    ids=[
        *("the neighbour's ancestors", "the neighbour's place", "padding that is seen"),
        *("packed, the neighbour's ancestors", "packed, the neighbour's place", "packed, pieces one place late"),
    ],
)
def test_twins_are_noticed(  # a budget that drops a parent changes no text: tests/core/test_flat.py has that twin
    monkeypatch: pytest.MonkeyPatch, kind: str, place: Any, name: str, twin: Any
) -> None:
    target, some = made_cases(kind)
    monkeypatch.setattr(place, name, twin)
    batch = new_batch(target, recurrent_drafter(target, memory_heads=2, memory_size=8))
    assert wrong(batch, some, range(12)) > 0
