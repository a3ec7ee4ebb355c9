"""Rows of a batch's state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.rows import keep_rows


@dataclass(frozen=True)
class Inner:
    values: Tensor
    label: str


@dataclass(frozen=True)
class Outer:
    values: Tensor
    inner: Inner
    cache: KVCache
    nothing: None = None


def test_rows_are_kept_at_every_depth():
    rows = torch.tensor([2, 0])
    values = torch.arange(12).view(4, 3)
    cache = KVCache(slots=5)
    keys = torch.randn(4, 2, 5, 3)
    cache.write(0, keys, -keys, torch.arange(5).expand(4, -1))
    kept = keep_rows(Outer(values, Inner(-values, "same"), cache), rows)
    assert torch.equal(kept.values, values[rows])
    assert torch.equal(kept.inner.values, -values[rows])
    assert kept.inner.label == "same"
    assert torch.equal(kept.cache.layers[0][0], keys[rows])
    assert torch.equal(kept.cache.layers[0][1], -keys[rows])
