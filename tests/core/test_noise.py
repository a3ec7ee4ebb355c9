import itertools

import torch
from scipy.stats import chisquare, kstest

from redrafter.core.noise import ACCEPT, DRAFT, SEEDED, fold, gumbel, uniform

F64 = torch.float64


def test_is_a_function_of_seed_position_and_token():
    seeds = torch.tensor([5, -9, 2**62])
    where = torch.tensor([[4, 5, 6], [0, 1, 2], [100, 7, 4]])
    whole = gumbel(seeds, where, 11, stream=SEEDED, dtype=F64)
    for row in range(3):
        for i in range(3):
            alone = gumbel(seeds[row : row + 1], where[row : row + 1, i : i + 1], 11, stream=SEEDED, dtype=F64)
            assert torch.equal(alone[0, 0], whole[row, i])
            fewer = gumbel(seeds[row : row + 1], where[row : row + 1, i : i + 1], 4, stream=SEEDED, dtype=F64)
            assert torch.equal(fewer[0, 0], whole[row, i, :4]), "a longer vocabulary must not move the others' noise"


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """splitmix64's finaliser, in Python's unbounded integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(seed: int, stream: int, position: int, index: int) -> float:
    row = mix((mix((seed + GOLDEN) & MASK) + GOLDEN * (stream + 1)) & MASK)
    key = mix((row + (position + 1) * GOLDEN) & MASK)
    return ((mix((key + (index + 1) * GOLDEN) & MASK) >> 11) + 0.5) * 2.0**-53


def test_wrapped_integers_are_the_generator_they_should_be():
    """Also the golden values: a change here changes every seeded text users have saved."""
    seeds = torch.tensor([1, -5, 2**63 - 1])
    where = torch.tensor([[0, 3], [9, 100_000], [7, 8]])
    for stream in (SEEDED, DRAFT):
        got = uniform(seeds, where, 3, stream=stream, dtype=F64)
        for row, i, token in itertools.product(range(3), range(2), range(3)):
            expected = reference(int(seeds[row]), stream, int(where[row, i]), token)
            assert float(got[row, i, token]) == expected
    assert reference(1, SEEDED, 0, 0) == 0.8847898165349133


def test_is_gumbel_and_uniform():
    seeds, where = torch.arange(50), torch.arange(40).expand(50, -1)
    assert kstest(gumbel(seeds, where, 50, stream=SEEDED, dtype=F64).flatten().numpy(), "gumbel_r").pvalue > 0.01
    u = uniform(seeds, where, 50, stream=ACCEPT, dtype=F64).flatten()
    assert kstest(u.numpy(), "uniform").pvalue > 0.01
    assert 0 < float(u.min()) < float(u.max()) < 1
    counts = torch.bincount((u * 64).long(), minlength=64)
    assert chisquare(counts.numpy()).pvalue > 0.01


def test_fp32_has_no_infinity_and_agrees_with_fp64():
    seeds, where = torch.arange(200), torch.arange(50).expand(200, -1)
    single = gumbel(seeds, where, 100, stream=SEEDED, dtype=torch.float32)
    double = gumbel(seeds, where, 100, stream=SEEDED, dtype=F64)
    assert bool(single.isfinite().all())
    upper = double > -1  # the lower tail decides nothing
    assert float((single - double)[upper].abs().max()) < 1e-5


def test_neighbours_do_not_correlate():
    seeds, where = torch.arange(100), torch.arange(60).expand(100, -1)
    noise = gumbel(seeds, where, 60, stream=SEEDED, dtype=F64)
    other = gumbel(seeds, where, 60, stream=DRAFT, dtype=F64)
    pairs = {
        "tokens": (noise[..., 1:], noise[..., :-1]),
        "positions": (noise[:, 1:], noise[:, :-1]),
        "seeds": (noise[1:], noise[:-1]),
        "streams": (noise, other),
        "diagonal": (noise[:, 1:, :-1], noise[:, :-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
        assert abs(correlation) < 0.01, name


def test_a_position_has_the_same_noise_alone_and_among_others():
    seeds, where, how = torch.tensor([3, 9]), torch.arange(2 * 3).view(2, 3), {"stream": SEEDED, "dtype": torch.float32}
    few = gumbel(seeds, where, 5000, **how)
    assert torch.equal(gumbel(seeds, where[:, 1:2], 5000, **how), few[:, 1:2])
    assert not torch.equal(gumbel(seeds, where + 1, 5000, **how), few), "twin: other positions"


def test_fold_separates_choices():
    folded = [fold(7, i) for i in range(100)] + [fold(8, i) for i in range(100)]
    assert len(set(folded)) == 200
    assert fold(7, 0) == 7
