import itertools

import pytest
import torch

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core.beam import beam_search, candidates
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.errors import ConfigError
from redrafter.kernels.beam_topk.naive import draft_scores

V = 5
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0))


def advance(state, tokens, parents):
    """State: how many tokens were read, to check that parents are followed."""
    if state is None:
        state = torch.zeros_like(tokens)
    return TABLE[tokens], state.gather(1, parents) + 1


def search(width, length, temperature=0.0, noise=None, token_ids=None, net=advance):
    last = torch.tensor([1, 3])
    noise = torch.zeros(2, length + 1, V) if noise is None else noise
    heat = torch.full((2,), temperature)
    return beam_search(net, None, last, width=width, length=length, temperature=heat, noise=noise, token_ids=token_ids)


def brute(last, length, scores):
    """All texts with their log-probabilities; scores(depth, token) -> (V,)."""
    found = []
    for text in itertools.product(range(V), repeat=length):
        total, at = 0.0, last
        for depth, token in enumerate(text):
            total += float(scores(depth, at)[token])
            at = token
        found.append((total, text))
    return sorted(found, reverse=True)


def test_wide_enough_finds_the_best_texts():
    beam = search(V, 3)  # W = V: with a first-order table nothing in the best W can be pruned early
    for row, last in enumerate((1, 3)):
        best = brute(last, 3, lambda d, t: TABLE[t].log_softmax(-1))[0]
        assert candidates(beam)[row, 0].tolist() == list(best[1])
        assert float(beam.scores[row, -1, 0]) == pytest.approx(best[0], abs=1e-5)


def test_width_one_is_greedy():
    beam = search(1, 4)
    for row, last in enumerate((1, 3)):
        at, expected = last, []
        for _ in range(4):
            at = int(TABLE[at].argmax())
            expected.append(at)
        assert beam.tokens[row, :, 0].tolist() == expected


def test_shared_noise_of_the_position():
    noise = torch.randn(2, 4, V) * 3
    beam = search(V, 3, temperature=0.7, noise=noise)
    for row, last in enumerate((1, 3)):
        best = brute(last, 3, lambda d, t, r=row: (TABLE[t] / 0.7 + noise[r, d]).log_softmax(-1))[0]
        assert candidates(beam)[row, 0].tolist() == list(best[1])


def test_noise_of_a_rule_is_zero_at_temperature_0():
    rule = make_rule(RuleConfig(), Shape(width=2, length=3), V, torch.float32)
    params = [SamplingParams(temperature=1.0), SamplingParams()]
    made = rule.search(Sampling.of(params, V, "cpu"), torch.tensor([1, 1]), torch.tensor([4, 4]))
    assert made.noise(4).shape == (2, 4, V)
    assert bool((made.noise(4)[0] != 0).all())
    assert bool((made.noise(4)[1] == 0).all())


def test_scores_are_fp32_even_for_a_bf16_drafter():
    def low(state, tokens, parents):
        return TABLE[tokens].bfloat16(), state

    assert search(2, 2, net=low).scores.dtype == torch.float32


def test_draft_vocabulary_maps_to_target_ids_and_their_noise():
    ids = torch.tensor([4, 0, 2])

    def small(state, tokens, parents):
        return TABLE[tokens][..., ids], state

    beam = search(2, 3, token_ids=ids, net=small)
    assert set(beam.tokens.flatten().tolist()) <= {0, 2, 4}
    noise = torch.zeros(2, 4, V)
    noise[:, 0, 2] = 100.0
    assert search(1, 3, 1.0, noise, ids, small).tokens[:, 0].tolist() == [[2], [2]]
    got = draft_scores(torch.zeros(2, 1, 3), torch.ones(2), noise[:, 0], ids)
    assert got.argmax(-1).tolist() == [[2], [2]]


def test_too_wide_for_the_vocabulary():
    with pytest.raises(ConfigError, match="beam width 6 is larger than the 5 tokens"):
        search(6, 2)


def test_scores_fall_along_a_path():
    beam = search(4, 4)
    for depth in range(1, 4):
        parent = beam.scores[:, depth - 1].gather(1, beam.parents[:, depth])
        assert bool((beam.scores[:, depth] <= parent).all())
