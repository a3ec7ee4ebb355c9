"""The drafter's kernels and `commit` against their oracles: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels import beam_topk  # noqa: E402
from redrafter.kernels import drafter_layers as narrow  # noqa: E402
from redrafter.kernels.beam_topk import naive as topw_naive  # noqa: E402
from redrafter.kernels.beam_topk import triton as topw_triton  # noqa: E402
from redrafter.kernels.commit import naive as commit_naive  # noqa: E402
from redrafter.kernels.commit import triton as commit_triton  # noqa: E402
from redrafter.kernels.drafter_layers import naive as narrow_naive  # noqa: E402
from redrafter.kernels.drafter_layers import triton as narrow_triton  # noqa: E402

BIG = DEVICE == "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of every log of 0


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 5, 9], [0, 1, 4, 0, 0]], ids=str)
def test_commit(path):
    torch.manual_seed(0)
    paths = torch.tensor([path, [0] * len(path)], device=DEVICE)
    lengths = torch.tensor([3, 7], device=DEVICE)
    cache = torch.randn(3, 2, 2, 2, 20, 24, device=DEVICE)
    mine = cache.clone()
    commit_naive.commit(cache, lengths, paths)
    commit_triton.commit(mine, lengths, paths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(mine[:, :, row, :, : length + len(path)], cache[:, :, row, :, : length + len(path)])


TOPW = [(1, 1, 100, 1), (2, 2, 700, 3), (1, 2, 1100, 16), (1, 3, 513, 7), (1, 1, 2100, 32)]
LARGE_TOPW = [
    (1, 16, 16384, 16),
    (1, 16, 32768, 16),
    (4, 64, 16384, 64),
    (1, 16, 49152, 16),
    (80, 16, 16384, 16),
    (2, 64, 128256, 64),
]


@pytest.mark.parametrize(
    ("case", "mapped"),
    [(c, m) for c in TOPW + LARGE_TOPW for m in (False, True)] if BIG else [(c, i % 2) for i, c in enumerate(TOPW)],
)
def test_topw(case, mapped):
    batch, beams, vocab, width = case
    torch.manual_seed(vocab)
    logits = torch.randn(batch, beams, vocab, device=DEVICE) * 3
    logits[:, :, 5] = -torch.inf
    total = -torch.rand(batch, beams, device=DEVICE)
    heat = torch.tensor([0.0, 0.7] * batch, device=DEVICE)[:batch]
    ids = torch.randperm(vocab + 50, device=DEVICE)[:vocab] if mapped else None
    noise = torch.randn(batch, vocab + 50, device=DEVICE)[:, : vocab + 50 if mapped else vocab]
    want = topw_naive.extend(logits, total, heat, noise, ids, width)
    got = topw_triton.extend(logits, total, heat, noise, ids, width)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert (got[1] == want[1]).float().mean() > 0.99  # a tie may fall either way
    assert (got[2] == want[2]).float().mean() > 0.99


CHAINED = [(1, 40, 1, True), (2, 600, 3, False)]  # widths that the kernel rounds up
LARGE_CHAINED = [(16, 16384, 16, True), (16, 32768, 16, True), (16, 49152, 32, False), (64, 16384, 64, True)]


@pytest.mark.parametrize("case", CHAINED + (LARGE_CHAINED if BIG else []), ids=str)
def test_topw_with_a_chain(case):
    """A token that the beam finds, tokens that it does not find, one with odds of 0, and a row off the chain."""
    beams, vocab, width, mapped = case
    random = torch.Generator().manual_seed(vocab + 4)  # a CPU's, so that every device tests the same case
    logits = torch.randn(6, beams, vocab, generator=random).to(DEVICE) * 3
    total = -torch.rand(6, beams, generator=random).to(DEVICE)
    heat = torch.tensor([0.0, 0.7] * 3, device=DEVICE)
    ids = torch.randperm(vocab + 50, generator=random).to(DEVICE)[:vocab] if mapped else None
    noise = torch.randn(6, vocab + 50, generator=random).to(DEVICE)[:, : vocab + 50 if mapped else vocab]
    follows = torch.zeros(6, beams, dtype=torch.bool, device=DEVICE)
    follows[:5, beams // 2] = True
    best, worst = logits[:, beams // 2].argmax(1), logits[:, beams // 2].argmin(1)
    token = torch.where(torch.tensor([1, 0, 1, 0, 1, 1], device=DEVICE) > 0, best, worst)
    token = token if ids is None else ids[token]
    if mapped:
        token[3] = next(t for t in range(vocab + 50) if t not in ids)
    odds = torch.tensor([0.7, 0.6, 0.65, 1e-6, 0.0, 0.9], device=DEVICE)
    beam = (logits, total, heat, noise, ids, width)
    want = topw_naive.extend_with_chain(*beam, token, odds, follows)
    got = topw_triton.extend(*beam, topw_triton.Chain(token, odds, follows))
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.equal(mine, theirs)
    assert want[3].any(1).tolist() == [True, True, True, False, False, False]
    assert not torch.equal(want[0], topw_naive.extend(*beam)[0]), "else the chain had no effect"


@pytest.mark.parametrize("vocab", [20, 600])
def test_topw_among_too_few_guesses_names_tokens_that_exist(vocab):
    """Two tokens of each beam are possible, sixteen are asked for."""
    logits = torch.full((1, 3, vocab), -torch.inf, device=DEVICE)
    logits[:, :, [4, 9]] = torch.randn(1, 3, 2, device=DEVICE)
    total, heat = torch.zeros(1, 3, device=DEVICE), torch.zeros(1, device=DEVICE)
    ids = torch.arange(vocab, device=DEVICE) + 1000
    noise = torch.zeros(1, vocab + 1000, device=DEVICE)
    want = topw_naive.extend(logits, total, heat, noise, ids, 16)
    best, parents, tokens, _ = topw_triton.extend(logits, total, heat, noise, ids, 16)
    torch.testing.assert_close(best, want[0])
    assert torch.equal(parents[:, :6], want[1][:, :6])
    assert torch.equal(tokens[:, :6], want[2][:, :6])
    assert (best[:, 6:] == -torch.inf).all()
    assert ((tokens >= 1000) & (tokens < 1000 + vocab)).all()
    assert (parents < 3).all()


def test_topw_at_no_noise_reads_one_zero():
    """One temperature for all rows and one noise for all tokens, each expanded; behind the temperature is another."""
    logits = torch.randn(2, 4, 600, device=DEVICE)
    total = torch.zeros(2, 4, device=DEVICE)
    noise = torch.zeros(1, device=DEVICE).expand(2, 600)
    heat = torch.tensor([0.0, 5.0], device=DEVICE)[:1].expand(2)
    want = topw_naive.extend(logits, total, heat, noise, None, 4)
    got = beam_topk._extend(logits, total, heat, noise, None, 4)
    assert all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(got, want, strict=True))


NARROW = [(1, 1, 24, 40), (2, 3, 33, 17), (1, 16, 100, 60)]
LARGE_NARROW = [(1, 16, 1920, 1920), (4, 16, 1024, 1024), (1, 64, 1920, 1920), (2, 5, 6272, 6272)]


@pytest.mark.parametrize("case", NARROW + (LARGE_NARROW if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
def test_narrow_layers(case, dtype):
    batch, beams, size, other = case
    tight = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}

    def random(*shape):
        return (torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5).to(dtype)

    def same(name, *args):
        got, want = (getattr(m, name)(*args) for m in (narrow_triton, narrow_naive))
        torch.testing.assert_close(got, want, **tight)

    state = random(batch, beams, size) * 10
    for normed in (False, True):
        same("block", state, random(size, size), random(size), normed)
    wide = random(other, size + 3 + other)  # columns of one matrix, as the drafter has them
    share, reading = random(batch, 1, other), random(batch, beams, other)
    same("joint", state, wide[:, :size], share, None, None)
    same("joint", state, wide[:, :size], share, reading, wide[:, -other:])
    for parts in (1, 2):
        unit = random(parts * size, size), random(parts * size)
        same("cell", state, *unit, random(batch, beams, parts * size))
        parents = torch.randint(beams, (batch, beams + 2), device=DEVICE)
        tokens, places = torch.randint(70, parents.shape, device=DEVICE), torch.randint(50, (70,), device=DEVICE)
        table = random(50, parts * size) * size**0.5  # so large that another row of it is another result
        same("cell", state, *unit, table, parents, tokens, places)
        got, want = (
            m.cell(state, *unit, table, parents, tokens, p)
            for m, p in ((narrow_triton, places), (narrow_naive, 49 - places))
        )
        assert not torch.allclose(got, want, **tight)
    memory = torch.randn(batch, 2, 20, 20, device=DEVICE) * 3
    same("read", random(batch, beams, 40), memory)
    # The kernel for the vocabulary takes widths that are multiples of 16.
    wide, vocabulary = random(batch, beams, 16 * other), random(150, 16 * other) * other**0.5
    (x, scale), (rows, scales) = narrow.rounded(wide), narrow.rounded(vocabulary)
    same("head", x, scale, rows, scales, dtype)
    got = narrow_triton.head(x, scale, rows, scales, dtype)
    assert torch.allclose(got.float(), wide.float() @ vocabulary.float().T, atol=0.02)
    assert not torch.allclose(got, narrow_naive.head(x, scale, rows, scales.flip(0), dtype), **tight)


def test_twin_narrow_block_without_its_norm_differs():
    x, w, b = (
        torch.randn(1, 2, 24, device=DEVICE) * 5,
        torch.randn(24, 24, device=DEVICE),
        torch.zeros(24, device=DEVICE),
    )
    assert not torch.allclose(narrow_triton.block(x, w, b, True), narrow_naive.block(x, w, b, False))


@pytest.mark.skipif(BIG, reason="on a GPU the real trial decides")
def test_narrow_kernels_are_used_only_where_a_trial_went_well(monkeypatch):
    monkeypatch.setattr(narrow, "runs_triton", lambda device: True)
    here = torch.ones(2, 3, 4)
    with torch.no_grad():
        monkeypatch.setattr(narrow, "_TRUSTED", {})
        assert not narrow.narrow(here), "not tried yet"
        narrow.trial(here)
        assert narrow.narrow(here)
        assert not narrow.narrow(torch.ones(65, 4)), "too many rows"
        monkeypatch.setattr(narrow, "_TRUSTED", {})
        monkeypatch.setattr(narrow_naive, "block", lambda *args: torch.zeros(2, 3, 80))
        narrow.trial(here)
        assert not narrow.narrow(here), "the twin: it does not agree"
    with torch.enable_grad():
        assert not narrow.narrow(here), "training differentiates torch's own"
