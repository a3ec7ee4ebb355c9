"""Texts written in bulk are those the engine writes one batch at a time."""

import pytest
import torch

from redrafter.config import SamplingParams
from redrafter.core.cache import KVCache
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.runtime import bulk
from redrafter.runtime.row import Request
from redrafter.targets import Target
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, make_model

BUDGETS = [20, 1, 33, 17, 40]
TEMPERATURES = [0.0, 0.0, 0.7, 0.0, 1.0]


def plain(target: Target, eos: tuple[int, ...]) -> list[list[int]]:
    engine = Engine(target, NoDrafter())
    texts = []
    for i, prompt in enumerate(PROMPTS):
        request = engine.requests([prompt], max_new_tokens=BUDGETS[i], seed=i, temperature=TEMPERATURES[i])[0]
        texts.append(engine.complete([type(request)(**(vars(request) | {"eos": eos}))])[0].tokens)
    return texts


def starts(eos: tuple[int, ...], shift: int = 0) -> list[Request]:
    return [
        Request(
            prompt=p,
            seed=i + shift,
            max_new_tokens=BUDGETS[i],
            sampling=SamplingParams(temperature=TEMPERATURES[i]),
            eos=eos,
        )
        for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_same_texts_as_the_engine(kind: str, rows: int) -> None:
    target = Target(make_model(kind))
    before = target.config._attn_implementation
    eos = (11, 23)
    told: list[int] = []
    written = bulk.write_texts(target, starts(eos), rows=rows, progress=told.append)
    assert written == plain(target, eos)
    assert sum(told) == sum(len(t) for t in written)
    assert target.config._attn_implementation == before


def test_another_seed_gives_another_text() -> None:
    target = Target(make_model())
    written = bulk.write_texts(target, starts((), shift=1), rows=2)
    same = [a == b for a, b in zip(written, plain(target, ()), strict=True)]
    assert same == [t == 0 for t in TEMPERATURES]


def test_a_broken_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: rows that read each other's prompts write other texts."""
    target = Target(make_model())
    place = KVCache.place

    def wrong(self: KVCache, other: KVCache, rows: torch.Tensor) -> None:
        place(self, other, rows.flip(0))

    monkeypatch.setattr(KVCache, "place", wrong)
    assert bulk.write_texts(target, starts(()), rows=5) != plain(target, ())


def test_nothing_to_write() -> None:
    assert bulk.write_texts(Target(make_model()), [], rows=4) == []
