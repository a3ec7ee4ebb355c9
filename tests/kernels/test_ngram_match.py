"""The kernel finds the same matches as plain torch: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from redrafter.kernels.ngram_match import naive
from tests.helpers.verification import DEVICE

ngram_triton = pytest.importorskip("redrafter.kernels.ngram_match.triton")


def texts(rows: int, slots: int, kinds: int):
    """Texts of few kinds of tokens, so that many places match; of every length, with leftovers behind the end."""
    draw = torch.Generator().manual_seed(slots)
    tokens = torch.randint(kinds, (rows, slots), generator=draw)
    lengths = torch.randint(1, slots + 1, (rows,), generator=draw)
    lengths[:3] = torch.tensor([1, 2, slots])
    return tokens.to(DEVICE), lengths.to(DEVICE)


@pytest.mark.parametrize(("slots", "kinds"), [(40, 3), (130, 20), (300, 60)])
@pytest.mark.parametrize("shortest", [1, 2])
def test_the_same_chains(slots, kinds, shortest, monkeypatch):
    monkeypatch.setattr(ngram_triton, "BLOCK", 128)  # several rounds
    text = texts(8, slots, kinds)
    want, got = (m.chain(*text, 5, shortest, 15) for m in (naive, ngram_triton))
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])
    assert len(want[1].unique()) > 1, "else nothing was found"
    other = ngram_triton.chain(*text, 5, shortest + 1, 15)
    assert not torch.equal(want[1], other[1]), "the twin: longer matches only"


def test_a_view_of_longer_texts():
    tokens, lengths = texts(4, 90, 5)
    whole = torch.full((4, 200), 77, device=DEVICE)
    whole[:, :90] = tokens
    got, want = ngram_triton.chain(whole[:, :90], lengths, 5, 1, 15), naive.chain(tokens, lengths, 5, 1, 15)
    assert all(map(torch.equal, got, want))
