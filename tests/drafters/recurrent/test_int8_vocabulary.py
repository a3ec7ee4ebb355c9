"""The int8 vocabulary of a GPU, here in plain torch."""

import torch

from redrafter.drafters.recurrent import drafter as module
from redrafter.kernels.drafter_layers import naive
from redrafter.targets import load_target
from tests.helpers.zoo import VOCAB, make_model, recurrent_drafter


def test_a_vocabulary_is_rounded_in_parts(monkeypatch):
    """A whole vocabulary in fp32, several times over, may not fit beside the target."""
    drafter, sizes = recurrent_drafter(load_target(make_model()), head="tied"), []

    def rounded(x):
        sizes.append(len(x))
        return naive.rounded(x)

    for name, value in {"TOGETHER": 7, "ALIGNED": 1, "narrow": lambda x: True, "head": naive.head}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "rounded", rounded)
    x = torch.randn(3, drafter.vocabulary.shape[1], dtype=drafter.vocabulary.dtype)
    made = drafter._rounded(lambda x: x)(x)
    *parts, rows = sizes
    assert (max(parts), sum(parts), rows) == (7, VOCAB, 3)
    assert torch.equal(made, naive.head(*naive.rounded(x), *naive.rounded(drafter.vocabulary), x.dtype))
    assert not torch.equal(made, x @ drafter.vocabulary.T), "the twin: not rounded"
