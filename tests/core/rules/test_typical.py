"""The rule `typical`: golden values of its threshold, and that it accepts less as the threshold grows."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter.core.rules.typical import accept_typical, typical_threshold
from redrafter.core.tree import pack_beam
from tests.core.rules.trees import random_tree


def test_typical_golden_values():
    p = torch.tensor([0.7, 0.2, 0.06, 0.04])
    entropy = -(p * p.log()).sum()
    assert float(typical_threshold(p.log(), 0.3, 0.09)) == pytest.approx(0.09 * math.exp(-float(entropy)))
    one_hot = torch.tensor([1.0, 0.0, 0.0]).log()
    assert float(typical_threshold(one_hot, 0.3, 0.09)) == pytest.approx(0.09)  # entropy 0: delta alone
    assert float(typical_threshold(one_hot, 0.3, 0.9)) == pytest.approx(0.3)  # epsilon caps it

    # The root's distribution is p: its threshold is 0.0378 by the formula, so 0.04 passes and nothing smaller.
    beam = torch.tensor([[[3]], [[2]]])
    tree, _ = pack_beam(beam, torch.tensor([0, 0]))
    scores = p.log().expand(2, 2, 4)
    assert float(typical_threshold(p.log(), 0.3, 0.09)) == pytest.approx(0.03778, abs=1e-4)
    got = accept_typical(scores, scores.argmax(-1), tree, epsilon=0.3, delta=0.09)
    assert got.count.tolist() == [2, 2]
    assert got.tokens.tolist() == [[3, 0], [2, 0]], "the accepted node's own token, then the target's choice"
    got = accept_typical(scores, scores.argmax(-1), tree, epsilon=0.3, delta=0.12)  # threshold 0.0504: only 0.06 passes
    assert got.count.tolist() == [1, 2]


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_typical_accepts_less_as_epsilon_or_delta_grows(seed):
    tree, scores = random_tree(seed, batch=8)
    grid = (0.01, 0.05, 0.1, 0.3, 0.6, 0.9)
    for fixed in grid:
        by_epsilon = [accept_typical(scores, scores.argmax(-1), tree, epsilon=e, delta=fixed).count for e in grid]
        by_delta = [accept_typical(scores, scores.argmax(-1), tree, epsilon=fixed, delta=d).count for d in grid]
        for counts in (by_epsilon, by_delta):
            for before, after in itertools.pairwise(counts):
                assert bool((after <= before).all())


def test_typical_acceptance_really_falls():
    tree, scores = random_tree(1, batch=64)
    loose = accept_typical(scores, scores.argmax(-1), tree, epsilon=0.05, delta=0.05).count.sum()
    tight = accept_typical(scores, scores.argmax(-1), tree, epsilon=0.9, delta=2.0).count.sum()
    assert tight < loose
