"""The seeded choice in numpy against the oracle in torch: the same tokens."""

import pytest
import torch

from redrafter.core.noise import SEEDED, gumbel
from redrafter.kernels import verify
from redrafter.kernels.verify import host, naive


@pytest.mark.parametrize("floored", [False, True])
def test_it_chooses_what_the_oracle_chooses(floored):
    torch.manual_seed(0)
    logits, depths = 3 * torch.randn(3, 5, 700), torch.randint(4, (3, 5))
    logits[0, 1, 7] = logits[0, 1, 9] = 40.0  # a tie, which the first wins
    heat, seeds = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([1, 2, 3])
    noise = gumbel(seeds, torch.arange(4).expand(3, -1), 700, stream=SEEDED, dtype=torch.float32)
    floor = logits.topk(20, dim=-1).values[..., -1] if floored else None
    before, wanted = logits.clone(), naive.seeded(logits, depths, heat, noise, floor)
    assert torch.equal(host.seeded(logits, depths, heat, noise, floor), wanted)
    assert torch.equal(verify.seeded(logits, depths, heat, seeds, seeds, floor, SEEDED, lambda: noise), wanted)
    assert torch.equal(logits, before)
    for other in ((logits, depths, heat, noise.flip(1), floor), (logits, depths.flip(1), heat, noise, floor)):
        assert not torch.equal(host.seeded(*other), wanted), "twin: the noise of other depths"
