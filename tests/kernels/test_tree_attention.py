"""Tree attention and the packed mask against their oracle: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.core.tree import ancestors
from redrafter.kernels.tree_attention import naive, triton_mask
from redrafter.kernels.tree_attention import triton as kernel

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of inf - inf
BORDERS = [0, 15, 17, 128, 143, 145]
"""Lengths around the newest keys, the first part, and both together."""


def random_tree(batch: int, n: int, deep: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths (B, n) and ancestors (B, n, n) of random trees, parents before their children, none too deep."""
    parents = torch.zeros(batch, n, dtype=torch.long)
    depths = torch.zeros(batch, n, dtype=torch.long)
    for row in range(batch):
        for i in range(1, n):
            choice = (depths[row, :i] < deep).nonzero()[:, 0]
            parents[row, i] = choice[torch.randint(len(choice), ())]
            depths[row, i] = depths[row, parents[row, i]] + 1
    return depths.to(DEVICE), ancestors(parents, n).to(DEVICE)


def chains(batch: int, n: int) -> tuple[torch.Tensor, None]:
    return torch.arange(n, device=DEVICE).expand(batch, -1), None


def random_cache(places: int, kv: int, slots: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys and values (2, P, K, S, D), nowhere written."""
    return torch.full((2, places, kv, slots, size), float("nan"), dtype=dtype, device=DEVICE)


def filled(cache: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Random keys and values in each row's slots up to the last node's."""
    for length, place in packed[:, 0, 0, [naive.LENGTH, naive.PLACE]].tolist():
        there = cache[:, place, :, : length + packed.shape[2]]
        there.copy_(torch.randn(there.shape, device=DEVICE))
    return cache


def attended(query, cache, packed):
    """What the kernel gives; programs count their arrivals, and the count is zero again afterwards."""
    arrivals = torch.zeros(kernel.COUNTERS, dtype=torch.int32, device=DEVICE)
    if BIG:
        torch.cuda.synchronize()  # the kernel that writes the mask must not be the one right before
    for _ in range(3 if BIG else 1):  # the last program to come merges, which may be another each time
        got = kernel.attend(query, cache[0], cache[1], packed, arrivals, query.shape[-1] ** -0.5)
        assert not arrivals.any()
    return got


def check(got, want, dtype=torch.float32):
    assert torch.isfinite(want).all()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, want, **close)


CASES = [  # kind, heads, kv heads, n, D, lengths, window
    ("tree", 1, 1, 5, 16, BORDERS, None),
    ("tree", 2, 1, 7, 24, [3, 37], 9),
    ("tree", 1, 1, 70, 16, [0, 130], 40),
    ("chain", 1, 1, 5, 16, BORDERS, None),
    ("chain", 2, 1, 40, 16, [0, 120], 20),
    ("tree", 2, 2, 1, 16, [0, 16, 145], None),
    ("chain", 1, 1, 1, 16, [16, 144], 3),
]
LARGE = [
    ("tree", 32, 32, 1, 128, [512], None),
    ("tree", 32, 32, 64, 128, [700], None),
    ("tree", 32, 8, 64, 128, [512, 1, 900], None),
    ("tree", 9, 3, 64, 64, [300, 2000], 512),
    ("tree", 8, 8, 129, 80, [300, 61], None),
    ("tree", 8, 4, 64, 256, [300, 5000], 1024),
    ("tree", 32, 32, 16, 128, [100 + i for i in range(40)], None),
    ("chain", 32, 8, 512, 128, [0, 1024], None),
    ("chain", 8, 4, 300, 256, [4000], 1024),
]


@pytest.mark.parametrize("case", CASES + (LARGE if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
@pytest.mark.parametrize("programs", ["many", "one"])
def test_attention(case, dtype, programs, monkeypatch):
    kind, heads, kv, n, size, lengths, window = case
    if programs == "one":
        monkeypatch.setattr(kernel, "PROGRAMS", 1)  # one program computes all parts
    torch.manual_seed(n)
    depths, mask = (random_tree if kind == "tree" else chains)(len(lengths), n)
    packed = naive.pack_mask(torch.tensor(lengths, device=DEVICE), depths, mask, window)
    cache = filled(random_cache(len(lengths), kv, max(lengths) + n + 3, size, dtype), packed)
    query = torch.randn(len(lengths), n, heads, size, device=DEVICE).to(dtype)
    want = naive.attend(query, *cache, packed, size**-0.5)
    got = attended(query, cache, packed)
    check(got, want, dtype)
    shorter = naive.pack_mask(torch.tensor(lengths, device=DEVICE), depths, mask, 2)
    assert not torch.allclose(got, naive.attend(query, *cache, shorter, size**-0.5), atol=5e-2), "twin: a window of 2"


SETTINGS = [
    {"newest_programs": 1, "workers": 2},
    {"newest_programs": 2, "workers": 5},
    {"newest_programs": 0, "workers": 3, "M": 64},
    {"newest_programs": 0, "workers": 0, "M": 32},
]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_other_launch_parameters_give_the_same(changed, monkeypatch):
    """One kernel or several, and programs of other sizes."""
    depths, mask = random_tree(1, 20)
    packed = naive.pack_mask(torch.tensor([660], device=DEVICE), depths, mask)
    cache, query = filled(random_cache(1, 1, 700, 16), packed), torch.randn(1, 20, 2, 16, device=DEVICE)
    usual = kernel.plan(1, 40, 700, torch.float32, 16)
    monkeypatch.setattr(kernel, "plan", lambda *_: usual | changed)
    got, want = attended(query, cache, packed), naive.attend(query, *cache, packed, 0.25)
    check(got, want)
    cache[:, :, :, 200] += 1  # twin: a key of the second part
    assert not torch.allclose(got, naive.attend(query, *cache, packed, 0.25), atol=1e-4)


def test_a_limit_of_registers_is_for_nvidia_only(monkeypatch):
    for hip, limited in ((None, True), ("6.4", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert ("maxnreg" in kernel.plan(1, 16, 100, torch.bfloat16, 64)) == limited


@pytest.mark.parametrize("deep", [20, 128])
def test_a_tree_deeper_than_the_newest_keys(deep):
    """20 levels with branches at each, then a chain: 16 newest keys would take nodes beside the path for older keys."""
    n, slots = deep + 20, deep + 60
    branches = (i // 2 * 2 for i in range(39))  # node 2 i + 1 is a leaf beside node 2 i + 2
    parents = torch.tensor([[0, *branches, *range(39, n - 1)]])
    mask = ancestors(parents, deep).to(DEVICE)
    depths = mask.sum(-1) - 1
    assert int(depths.max()) == deep
    packed, shallow = (naive.pack_mask(torch.tensor([30], device=DEVICE), depths, mask, deep=x) for x in (deep, 15))
    cache, query = filled(random_cache(1, 1, slots, 16), packed), torch.randn(1, 40, 1, 16, device=DEVICE)
    by_hand = torch.ones(n, slots, dtype=torch.bool, device=DEVICE)
    by_hand[:, 30 : 30 + n], by_hand[:, 30 + n :] = mask[0], False
    assert torch.equal(naive.visible(packed, slots)[0], by_hand)
    packed, shallow = packed[:, :, -40:], shallow[:, :, -40:]  # the last nodes, which are the deepest
    want = naive.attend(query, *cache, packed, 0.25)
    check(attended(query, cache, packed), want)
    assert not torch.allclose(attended(query, cache, shallow), want, atol=1e-2), "twin: not told how deep"


@pytest.mark.parametrize("places", [[4, 1], [1, 4]])
@pytest.mark.parametrize("kind", [random_tree, chains])
def test_rows_at_places_of_a_larger_cache(kind, places):
    """Rows read where their places say; in a cache of their own they would get the same."""
    depths, mask = kind(2, 6)
    at, stand = torch.tensor([5, 19], device=DEVICE), torch.tensor(places, device=DEVICE)
    placed = naive.pack_mask(at, depths, mask, None, stand)
    cache = filled(random_cache(5, 2, 30, 16), placed)
    query = torch.randn(2, 6, 4, 16, device=DEVICE)
    want = naive.attend(query, *cache[:, stand], naive.pack_mask(at, depths, mask), 0.25)
    for got in (naive.attend(query, *cache, placed, 0.25), attended(query, cache, placed)):
        check(got, want)
    both = filled(cache, naive.pack_mask(at.flip(0), depths, mask, None, stand))
    swapped = naive.pack_mask(at, depths, mask, None, stand.flip(0))
    assert not torch.allclose(attended(query, both, swapped), want, atol=1e-2), "twin: at each other's places"


@pytest.mark.parametrize("window", [None, 1, 3, 25])
@pytest.mark.parametrize("kind", [random_tree, chains])
def test_what_a_mask_shows(kind, window):
    """Against the definition: the text, the ancestors, and as far back as the window reaches."""
    depths, mask = kind(2, 20)
    lengths = torch.tensor([3, 40], device=DEVICE)
    above = mask if mask is not None else (depths[:, :, None] >= depths[:, None])
    for row, length in enumerate(lengths.tolist()):
        position = torch.cat([torch.arange(length, device=DEVICE), length + depths[row]])
        seen = torch.cat([torch.ones(20, length, dtype=torch.bool, device=DEVICE), above[row]], dim=1)
        seen &= (length + depths[row])[:, None] - position < (window or 1 << 40)
        got = naive.visible(naive.pack_mask(lengths, depths, mask, window), 70)[row]
        assert torch.equal(got[:, : length + 20], seen)
        assert not got[:, length + 20 :].any()


def test_twin_attention_with_a_wrong_ancestor_differs():
    depths, mask = random_tree(1, 6)
    wrong = mask.clone()
    wrong[0, 5, 5] = False
    right, other = (naive.pack_mask(torch.tensor([4], device=DEVICE), depths, m) for m in (mask, wrong))
    cache, query = filled(random_cache(1, 2, 20, 16), right), torch.randn(1, 6, 2, 16, device=DEVICE)
    a, b = attended(query, cache, right), attended(query, cache, other)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5], b[:, 5])


@pytest.mark.parametrize("n", [1, 5, 64, 70])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("places", [None, [7, 2]])
def test_pack_mask(n, window, places):
    rows = 2 if n < 64 or BIG else 1  # the interpreter is slow
    lengths = torch.tensor([1 << 33, 5], device=DEVICE)[:rows]
    stand = None if places is None else torch.tensor(places, device=DEVICE)[:rows]
    for depths, mask in (random_tree(rows, n), chains(rows, n)):
        got, want = (m.pack_mask(lengths, depths, mask, window, stand) for m in (triton_mask, naive))
        assert got.dtype == want.dtype == torch.long
        assert torch.equal(got, want)
        assert not torch.equal(got, naive.pack_mask(lengths, depths, mask, 8, stand)), "twin: another window"
        if mask is not None:
            wrong = mask.clone()
            wrong[-1, n - 1, n - 1] = False
            assert not torch.equal(got, naive.pack_mask(lengths, depths, wrong, window, stand)), "twin: an ancestor"


@pytest.mark.skipif(not BIG, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 40, 600])
@pytest.mark.parametrize(("heads", "kv", "size"), [(8, 8, 128), (8, 2, 64), (4, 2, 256)])
def test_a_node_has_the_bits_of_its_path_in_plain_decoding(dtype, window, heads, kv, size):
    """Keys are moved to the slots that plain decoding gives them; then each node of the path is read alone."""
    depths, mask = random_tree(1, 64, deep=6)
    path = mask[0, int(depths.argmax())].nonzero()[:, 0]
    for length in (0, 5, *BORDERS[1:], 512, 513, 527, 528, 2064, 4095, 4112):
        packed = naive.pack_mask(torch.tensor([length], device=DEVICE), depths, mask, window)
        cache = filled(random_cache(1, kv, length + 70, size, dtype), packed)
        query = torch.randn(1, 64, heads, size, device=DEVICE).to(dtype)
        together = attended(query, cache, packed)[0, path]
        plain = cache.clone()
        plain[:, :, :, length : length + len(path)] = cache[:, :, :, length + path]
        plain[:, :, :, length + len(path) :] = float("nan")
        ones = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)

        def alone(i, node, length=length, query=query, plain=plain, ones=ones, deep=6):
            at = naive.pack_mask(torch.tensor([length + i], device=DEVICE), depths[:, :1], ones, window, deep=deep)
            return attended(query[:, node : node + 1], plain, at)[0, 0]

        assert all(torch.equal(alone(i, node), together[i]) for i, node in enumerate(path.tolist())), length
        at = naive.pack_mask(torch.tensor([length], device=DEVICE), *chains(1, len(path)), window)
        assert torch.equal(attended(query[:, path], plain, at)[0], together), length
    if window is None:  # twin: the border of older keys depends on the pass
        assert not all(torch.equal(alone(i, node, deep=40), together[i]) for i, node in enumerate(path.tolist()))
