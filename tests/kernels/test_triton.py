"""Triton kernels against their oracles: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.core.tree import ancestors  # noqa: E402
from redrafter.kernels import drafter_layers as narrow  # noqa: E402
from redrafter.kernels.beam_topk import naive as topw_naive  # noqa: E402
from redrafter.kernels.beam_topk import triton as topw_triton  # noqa: E402
from redrafter.kernels.commit import naive as commit_naive  # noqa: E402
from redrafter.kernels.commit import triton as commit_triton  # noqa: E402
from redrafter.kernels.drafter_layers import naive as narrow_naive  # noqa: E402
from redrafter.kernels.drafter_layers import triton as narrow_triton  # noqa: E402
from redrafter.kernels.norm_gate import naive as between_naive  # noqa: E402
from redrafter.kernels.norm_gate import triton as between_triton  # noqa: E402
from redrafter.kernels.tree_attention import naive as attention_naive  # noqa: E402
from redrafter.kernels.tree_attention import triton as attention_triton  # noqa: E402

BIG = DEVICE == "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of every log of 0


def random_tree(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths (B, n) and ancestors (B, n, n) of random trees whose parents stand before their children."""
    parents = torch.stack([torch.tensor([0] + [int(torch.randint(i, ())) for i in range(1, n)]) for _ in range(batch)])
    mask = ancestors(parents, n)
    return mask.sum(-1) - 1, mask


ATTENTION = [  # B, heads, kv heads, n, D, lengths, window
    (1, 2, 2, 1, 16, [5], None),
    (2, 4, 2, 7, 16, [0, 37], None),
    (2, 3, 1, 12, 24, [70, 3], 9),
    (1, 2, 1, 70, 32, [130], 40),
]
LARGE = [
    (1, 32, 32, 1, 128, [512], None),
    (1, 32, 32, 64, 128, [700], None),
    (3, 32, 8, 64, 128, [512, 1, 900], None),
    (2, 9, 3, 64, 64, [300, 2000], 512),
    (2, 8, 8, 129, 80, [300, 61], None),
    (40, 32, 32, 16, 128, [100 + i for i in range(40)], None),
]


@pytest.mark.parametrize("case", ATTENTION + (LARGE if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
@pytest.mark.parametrize("turns", [None, "turned", "normed"])
def test_tree_attention(case, dtype, turns):
    batch, heads, kv, n, size, lengths, window = case
    torch.manual_seed(n)
    depths, mask = random_tree(batch, n)
    at = torch.tensor(lengths)
    packed = attention_naive.pack_mask(at, depths, mask, window).to(DEVICE)
    slots = max(lengths) + n + 3
    query = torch.randn(batch, n, heads, size, dtype=dtype, device=DEVICE).transpose(1, 2)
    key, value = (torch.randn(batch, n, kv, size, dtype=dtype, device=DEVICE).transpose(1, 2) for _ in range(2))
    caches = torch.full((2, batch, kv, slots, size), float("nan"), dtype=dtype, device=DEVICE)
    for row, length in enumerate(lengths):
        caches[:, row, :, :length] = torch.randn(2, kv, length, size, dtype=dtype, device=DEVICE)
    mine = caches.clone()
    angles = torch.randn(batch, n, size, device=DEVICE)  # of all heads, laid out as a model does
    scales = [torch.randn(size, device=DEVICE).to(dtype) for _ in range(2)]
    norms = (*scales, 1.0, 1e-5) if turns == "normed" else None
    turn = attention_naive.Rotary(angles.cos().to(dtype), angles.sin().to(dtype), norms) if turns else None
    want = attention_naive.attend(query, key, value, caches[0], caches[1], packed, size**-0.5, turn)
    arrivals = torch.zeros(attention_triton.PROGRAMS, dtype=torch.int32, device=DEVICE)
    for _ in range(3 if BIG else 1):  # parts are merged by whoever comes last, which may be another each time
        got = attention_triton.attend(query, key, value, mine[0], mine[1], packed, arrivals, size**-0.5, turn)
        assert not arrivals.any()
    assert torch.isfinite(want).all()
    tight = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, want, **tight)
    close = {"rtol": 2e-2, "atol": 2e-2} if turns else {"rtol": 0, "atol": 0}  # sums of two may round otherwise
    torch.testing.assert_close(mine, caches, **close, equal_nan=True)


@pytest.mark.parametrize("places", [[4, 1], [1, 4]])
def test_attention_at_places_of_a_larger_cache(places):
    """What rows read and write where they stand is what they would have among themselves; others are not touched."""
    torch.manual_seed(0)
    depths, mask = random_tree(2, 6)
    at, stand = torch.tensor([5, 9]), torch.tensor(places)
    query, key, value = (torch.randn(2, 2, 6, 16, device=DEVICE) for _ in range(3))
    whole = torch.randn(2, 5, 2, 20, 16, device=DEVICE)
    alone = whole[:, stand].clone()
    arrivals = torch.zeros(attention_triton.PROGRAMS, dtype=torch.int32, device=DEVICE)
    own = attention_naive.pack_mask(at, depths, mask).to(DEVICE)
    placed = attention_naive.pack_mask(at, depths, mask, None, stand).to(DEVICE)
    want = attention_naive.attend(query, key, value, alone[0], alone[1], own, 1.0)
    for attend in (attention_naive.attend, lambda *args: attention_triton.attend(*args[:6], arrivals, *args[6:])):
        mine = whole.clone()
        got = attend(query, key, value, mine[0], mine[1], placed, 1.0)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(mine[:, stand], alone)
        assert torch.equal(mine[:, [0, 2, 3]], whole[:, [0, 2, 3]])
        if places != sorted(places):  # twin: the same rows, each at the other's place
            other = attention_naive.pack_mask(at, depths, mask, None, stand.flip(0)).to(DEVICE)
            assert not torch.allclose(attend(query, key, value, mine[0], mine[1], other, 1.0), want, atol=1e-2)


def test_twin_attention_with_a_wrong_bit_differs():
    depths, mask = random_tree(1, 6)
    wrong = mask.clone()
    wrong[0, 5, 5] = False
    query, key, value = (torch.randn(1, 2, 6, 16, device=DEVICE) for _ in range(3))
    cache = torch.randn(2, 1, 2, 20, 16, device=DEVICE)
    arrivals = torch.zeros(attention_triton.PROGRAMS, dtype=torch.int32, device=DEVICE)
    packs = (attention_naive.pack_mask(torch.tensor([4]), depths, m).to(DEVICE) for m in (mask, wrong))
    a, b = (attention_triton.attend(query, key, value, cache[0], cache[1], p, arrivals, 1.0) for p in packs)
    assert (a[:, :5] == b[:, :5]).all()
    assert not torch.allclose(a[:, 5], b[:, 5])


BETWEEN = between_triton, between_naive


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", [16, 100, 4096] if BIG else [16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
def test_between(rows, size, dtype):
    torch.manual_seed(size)
    x = (torch.randn(rows, 2 * size, device=DEVICE) * 3).to(dtype)[:, :size]  # rows that do not touch
    weight, parts = torch.randn(size, device=DEVICE).to(dtype), torch.randn(3, rows, size, device=DEVICE)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for offset in (0.0, 1.0):
        got = between_triton.norm(x, weight, offset, 1e-5)
        torch.testing.assert_close(got, between_naive.norm(x, weight, offset, 1e-5), **tight)
        for given in (parts, parts[:1].to(dtype)):
            before, sums = x.clone(), torch.empty(2, rows, 3, size, dtype=dtype, device=DEVICE)[:, :, 1]
            added, want = (m.norm(x, weight, offset, 1e-5, given, s) for m, s in zip(BETWEEN, sums, strict=True))
            torch.testing.assert_close(added, want, **tight)
            torch.testing.assert_close(*sums, **tight)
            assert torch.equal(x, before)
            between_triton.norm(before, weight, offset, 1e-5, given, into=before)
            assert torch.equal(before, sums[0])
            assert not torch.allclose(added, got, **tight)
    assert not torch.allclose(got, between_naive.norm(x, weight, 0.0, 1e-5), **tight)
    joint = (torch.randn(rows, 2 * size, device=DEVICE) * 3).to(dtype)
    torch.testing.assert_close(between_triton.gate(joint), between_naive.gate(joint), **tight)
    swapped = torch.cat(joint.chunk(2, -1)[::-1], -1)
    assert not torch.allclose(between_triton.gate(joint), between_naive.gate(swapped), **tight)


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


TOPW = [(1, 1, 100, 1), (2, 3, 700, 3), (1, 5, 1100, 16), (2, 5, 513, 7), (1, 3, 2100, 32)]
LARGE_TOPW = [(1, 16, 16384, 16), (4, 64, 16384, 64), (1, 16, 49152, 16), (80, 16, 16384, 16), (2, 64, 128256, 64)]


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


@pytest.mark.parametrize("vocab", [20, 600])
def test_topw_among_too_few_guesses_names_tokens_that_exist(vocab):
    """Two tokens of each beam are possible, sixteen are asked for."""
    logits = torch.full((1, 3, vocab), -torch.inf, device=DEVICE)
    logits[:, :, [4, 9]] = torch.randn(1, 3, 2, device=DEVICE)
    total, heat = torch.zeros(1, 3, device=DEVICE), torch.zeros(1, device=DEVICE)
    ids = torch.arange(vocab, device=DEVICE) + 1000
    noise = torch.zeros(1, vocab + 1000, device=DEVICE)
    want = topw_naive.extend(logits, total, heat, noise, ids, 16)
    best, parents, tokens = topw_triton.extend(logits, total, heat, noise, ids, 16)
    torch.testing.assert_close(best, want[0])
    assert torch.equal(parents[:, :6], want[1][:, :6])
    assert torch.equal(tokens[:, :6], want[2][:, :6])
    assert (best[:, 6:] == -torch.inf).all()
    assert ((tokens >= 1000) & (tokens < 1000 + vocab)).all()
    assert (parents < 3).all()


def test_topw_at_no_noise_reads_one_zero():
    logits = torch.randn(2, 4, 600, device=DEVICE)
    total = torch.zeros(2, 4, device=DEVICE)
    noise = torch.zeros(1, device=DEVICE).expand(2, 600)
    want = topw_naive.extend(logits, total, torch.zeros(2, device=DEVICE), noise, None, 4)
    got = topw_triton.extend(logits, total, torch.zeros(2, device=DEVICE), noise, None, 4)
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
