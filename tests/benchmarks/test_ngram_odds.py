"""The table of odds in the code is the one that benchmarks/ngram_odds.py counted; and how it counts."""

import json

import torch

from benchmarks.common import HERE
from benchmarks.ngram_odds import DEPTHS, NAMES, CountingDrafter, rows_of
from redrafter import Shape
from redrafter.drafters.with_ngrams import ODDS, SHORTEST
from redrafter.targets import load_target
from redrafter.texts import Texts
from redrafter.tuning.simulate import text_batches
from tests.helpers.zoo import make_model, recurrent_drafter


def test_the_table_is_the_one_counted():
    counted = json.loads((HERE / "results" / "ngram_odds.json").read_text())["headline"]
    for name, by_size in ODDS.items():
        for size, odds in enumerate(by_size, start=SHORTEST):
            for depth, value in zip(DEPTHS, odds, strict=True):
                assert abs(counted[f"{name}_match_{size}_{depth}"] - value) <= 0.0051
    assert set(NAMES.values()) == set(ODDS)


def test_a_loop_is_always_right_and_its_end_is_not_counted():
    target = load_target(make_model())
    prompt = [3, 8, 5, 9] * 3
    drafter = CountingDrafter(recurrent_drafter(target))
    drafter.start()
    texts = Texts.of([prompt + [3, 8, 5, 9] * 4 + [11, 30]], [len(prompt)], [0.0], [0])
    for batch in text_batches(target, drafter.layers, texts):
        drafter.batch = batch
        batch.simulate(drafter, Shape(width=2, length=2, nodes=4))
    right, decided = drafter.counts
    assert not decided[:-1].any(), "every match is as long as matches get"
    wrong = (decided - right).sum()
    assert wrong >= 1, "the loop ends with token 11"
    assert right.sum() > 20
    first, *_ = rows_of(torch.stack([right, decided]).flip(1), 0.0)
    assert first["match"] == SHORTEST
    assert first["odds"][0] < 1
