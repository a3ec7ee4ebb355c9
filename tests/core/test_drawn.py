"""The draw in two steps, over tokens of many cells and two spans: the rules' own tables are too small to see them."""

import pytest
import torch
from scipy.stats import chisquare

from redrafter.core.noise import RESIDUAL, gumbel
from redrafter.kernels.verify.naive import CELL, NEAR, SPAN, STRETCH, drawn, numbers

VOCAB = SPAN + STRETCH + 3 * NEAR + 5  # the last stretch is not full
PLACES = [0, 3, STRETCH, 2 * STRETCH + 7, NEAR, STRETCH + 5 * NEAR + 2, SPAN - 1, SPAN, SPAN + 9, VOCAB - 1]
WEIGHTS = torch.tensor([3, 5, 8, 2, 9, 4, 1, 7, 6, 5], dtype=torch.float64)
ROWS = 2000
SOUND, UNSOUND = 1e-3, 1e-9


def p_value(change=lambda noise: noise, turns: int = 10) -> float:
    """Of the tokens drawn, under their weights."""
    logw = torch.full((VOCAB,), -torch.inf)
    logw[PLACES] = WEIGHTS.log().float()
    seen = torch.zeros(VOCAB)
    for turn in range(turns):
        seeds = torch.arange(ROWS) + turn * ROWS
        noise = gumbel(seeds, torch.zeros_like(seeds)[:, None], numbers(VOCAB), stream=RESIDUAL, dtype=torch.float32)[
            :, 0
        ]
        seen += torch.bincount(drawn(logw.expand(ROWS, -1), change(noise)), minlength=VOCAB)
    assert seen.sum() == seen[PLACES].sum()
    return chisquare(seen[PLACES].double(), WEIGHTS / WEIGHTS.sum() * ROWS * turns).pvalue


def test_tokens_come_by_their_weights():
    assert p_value() > SOUND


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: torch.cat([noise[:, CELL : 2 * CELL], noise[:, CELL:]], 1),  # the cells' numbers, used again
        lambda noise: torch.cat([noise[:, :CELL], noise[:, CELL:] / 2], 1),
    ],
    ids=["numbers used twice", "too little noise"],
)
def test_twin_other_noise(change):
    assert p_value(change, turns=2) < UNSOUND


def test_the_last_cell_has_its_number():
    logw = torch.full((1, VOCAB), -torch.inf)
    logw[0, -1] = 0
    assert drawn(logw, torch.zeros(1, numbers(VOCAB))).item() == VOCAB - 1
    with pytest.raises(RuntimeError):
        drawn(logw, torch.zeros(1, numbers(VOCAB) - 1))
