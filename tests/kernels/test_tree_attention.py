"""Tree attention against its oracle: in Triton's interpreter on a CPU, for real on a GPU."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.core.flat import Flat, Piece, of_pieces
from redrafter.core.tree import ancestors
from redrafter.kernels.flatten.naive import flatten
from redrafter.kernels.tree_attention import naive, triton_tiles
from redrafter.kernels.tree_attention import triton as kernel
from redrafter.kernels.tree_attention.naive import PLACE, SLOT, SLOTS, WINDOW

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of inf - inf
BORDERS = [0, 15, 17, 128, 143, 145]
"""Lengths around the newest keys, the first part, and both together."""
Rows = Sequence[tuple[int, int]]
"""Tokens before each row's own ones, and how many these are."""


def random_trees(rows: int, n: int, deep: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths (B, n) and ancestors (B, n, n) of random trees, parents before their children, none too deep."""
    parents = torch.zeros(rows, n, dtype=torch.long)
    depths = torch.zeros(rows, n, dtype=torch.long)
    for row in range(rows):
        for i in range(1, n):
            choice = (depths[row, :i] < deep).nonzero()[:, 0]
            parents[row, i] = choice[torch.randint(len(choice), ())]
            depths[row, i] = depths[row, parents[row, i]] + 1
    return depths.to(DEVICE), ancestors(parents, n).to(DEVICE)


def mixture(
    trees: Rows = (),
    pieces: Rows = (),
    window: int | None = None,
    places: Sequence[int] | None = None,
    padding: int = 3,
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Flat:
    """A pass of pieces of prompts, trees (a plain row is one of a single node), an empty run and padding."""
    rows = len(pieces) + len(trees)
    places = list(range(rows)) if places is None else places
    begin = sum(size for _, size in pieces)
    tokens = begin + sum(size for _, size in trees) + padding
    given = [Piece(place, first, [0] * size) for place, (first, size) in zip(places, pieces, strict=False)]
    flat = of_pieces(given, 1 << 30, tokens, rows + 1)
    flat = Flat(flat.lines.to(DEVICE), flat.runs.to(DEVICE))
    if trees:
        lengths, sizes = torch.tensor(trees, device=DEVICE).T
        depths, mask = drafts or random_trees(len(trees), max(sizes))
        real = torch.arange(depths.shape[1], device=DEVICE) < sizes[:, None]
        at = torch.tensor(places[len(pieces) :], device=DEVICE)
        flatten(depths, depths, mask, real, lengths, at, 1 << 30, flat.lines, flat.runs[len(pieces) : rows], begin)
    if window is not None:
        flat.lines[flat.lines[:, SLOT] >= 0, WINDOW] = window
    return flat


def random_cache(flat: Flat, kv: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys and values (2, P, K, S, D), random up to each row's last slot; the rest was never written."""
    slots = int(flat.lines[:, SLOT].max()) + 4
    places = int(flat.lines[:, PLACE].max()) + 1
    cache = torch.full((2, places, kv, slots, size), float("nan"), dtype=dtype, device=DEVICE)
    for first, count in flat.runs.tolist():
        if count:
            lines = flat.lines[first : first + count]
            there = cache[:, lines[0, PLACE], :, : int(lines[:, SLOT].max()) + 1]
            there.copy_(torch.randn(there.shape, device=DEVICE))
    return cache


def random_query(flat: Flat, heads: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    query = torch.randn(len(flat.lines), heads, size, device=DEVICE).to(dtype)
    query[flat.lines[:, SLOT] < 0] = torch.nan  # of padding: nobody's result depends on it
    return query


def attended(query, cache, flat):
    """What the kernel gives for real tokens; the count of arrivals is zero again afterwards."""
    arrivals = torch.zeros(kernel.COUNTERS, dtype=torch.int32, device=DEVICE)
    heads, size = query.shape[1:]
    table, settings = kernel.tiles(flat.runs, len(flat.lines), heads, cache.shape[2], size, cache.shape[3], query.dtype)
    if BIG:
        torch.cuda.synchronize()  # the kernel that writes lines or the table must not be the one right before
    for _ in range(3 if BIG else 1):  # the last program to come merges, which may be another each time
        got = kernel.attend(query, *cache, flat.lines, table, settings, arrivals, size**-0.5)
        assert not arrivals.any()
    return got[flat.lines[:, SLOT] >= 0]


def expected(query, cache, flat):
    """The same by the oracle."""
    out = naive.attend(query, *cache, flat.lines, flat.runs, query.shape[-1] ** -0.5)
    return out[flat.lines[:, SLOT] >= 0]


def check(got, want, dtype=torch.float32):
    assert torch.isfinite(want).all()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, want, **close)


CASES = [  # trees, pieces, heads, kv heads, D, window
    ([(length, 1) for length in BORDERS], [], 1, 1, 16, None),
    ([(3, 7), (37, 2), (0, 5)], [], 2, 1, 24, 9),
    ([(130, 6), (16, 1)], [(0, 20), (120, 9)], 2, 2, 16, 20),
    ([(0, 1), (145, 4), (144, 1)], [(100, 30), (0, 1)], 1, 1, 16, None),
    ([(130, 40)], [], 1, 1, 16, 40),
]
LARGE = [
    ([(512, 1)], [], 32, 32, 128, None),
    ([(700, 64)], [], 32, 32, 128, None),
    ([(512, 64), (1, 64), (900, 3)], [], 32, 8, 128, None),
    ([(300, 64), (2000, 64)], [], 9, 3, 64, 512),
    ([(300, 64), (5000, 1)], [], 8, 4, 256, 1024),
    ([(100 + i, 1 + i % 7) for i in range(40)], [], 32, 32, 128, None),
    ([(100 + 40 * i, 1 + i % 3) for i in range(32)], [(1024, 256), (0, 100)], 32, 8, 128, None),
    ([(100, 64), (3000, 1)], [(4000, 300)], 8, 4, 256, 1024),
    ([], [(0, 512), (1024, 512)], 32, 8, 128, None),
    ([(300, 64), (61, 64)], [(9000, 129)], 8, 8, 80, None),
]


@pytest.mark.parametrize("case", CASES + (LARGE if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
@pytest.mark.parametrize("programs", ["many", "one"])
def test_attention(case, dtype, programs, monkeypatch):
    trees, pieces, heads, kv, size, window = case
    if programs == "one":
        monkeypatch.setattr(kernel, "PROGRAMS", 1)  # one program computes all parts
    flat = mixture(trees, pieces, window)
    cache, query = random_cache(flat, kv, size, dtype), random_query(flat, heads, size, dtype)
    got = attended(query, cache, flat)
    check(got, expected(query, cache, flat), dtype)
    flat.lines[:, WINDOW] = 2
    assert not torch.allclose(got, expected(query, cache, flat), atol=5e-2), "twin: a window of 2"


SETTINGS = [
    {"newest_programs": 1, "workers": 2},
    {"newest_programs": 2, "workers": 5},
    {"newest_programs": 0, "workers": 3, "M": 64},
    {"newest_programs": 0, "workers": 0, "M": 32},
]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_other_launch_parameters_give_the_same(changed, monkeypatch):
    """One kernel or several, and programs of other sizes; a short row beside a long one."""
    flat = mixture([(660, 12), (2, 3)])
    cache, query = random_cache(flat, 1, 16), random_query(flat, 2, 16)
    usual = kernel.plan(len(flat.lines), 1, 2, 1, 16, 700, torch.float32)
    monkeypatch.setattr(kernel, "plan", lambda *_: usual | changed)
    got = attended(query, cache, flat)
    check(got, expected(query, cache, flat))
    cache[:, :, :, 200] += 1  # twin: a key of the second part
    assert not torch.allclose(got, expected(query, cache, flat), atol=1e-4)


def test_a_limit_of_registers_is_for_nvidia_only(monkeypatch):
    for hip, limited in ((None, True), ("6.4", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert ("maxnreg" in kernel.plan(16, 1, 1, 1, 64, 100, torch.bfloat16)) == limited


def test_the_plan_follows_the_number_of_tiles():
    """Tiles of 16 while a mean run fits one; one kernel while tiles leave programs for parts of the older keys."""

    def kind(tokens, runs, heads, kv, slots):
        chosen = kernel.plan(tokens, runs, heads, kv, 128, slots, torch.bfloat16)
        return chosen["M"], chosen["newest_programs"], chosen["workers"] > 0

    assert kind(1, 1, 32, 32, 8192) == (16, 1, True), "plain decoding"
    assert kind(64, 1, 32, 32, 1024) == (16, 1, True), "a tree"
    assert kind(64, 1, 32, 8, 8192) == (64, 0, True), "a tree after a long text, of many queries per key head"
    assert kind(32, 32, 32, 32, 8192) == (16, 0, False), "enough rows for a program each"
    assert kind(128, 32, 32, 8, 8192) == (16, 0, False)
    assert kind(512, 1, 32, 8, 8192) == (64, 0, False), "a piece of a prompt"
    assert kind(2048, 1, 32, 32, 8192) == (64, 0, False), "no memory for parts"


def tiles_by_hand(runs, groups, m):
    wanted = [(first, count, start) for first, count in runs for start in range(0, groups * count, m)]
    return sorted(wanted)


@pytest.mark.parametrize(("groups", "m"), [(1, 16), (4, 16), (3, 64)])
def test_tiles(groups, m):
    random = torch.Generator().manual_seed(groups)
    for runs in (1, 5, 40):
        counts = torch.randint(30, (runs,), generator=random) * torch.randint(2, (runs,), generator=random)
        first = 7 + counts.cumsum(0) - counts
        wide = torch.stack([first, counts, first], 1).to(DEVICE)[:, :2]
        wanted = tiles_by_hand(wide.tolist(), groups, m)
        table = triton_tiles.write_tiles(wide, len(wanted) + 18, groups, m)
        got = [tuple(tile) for tile in table.tolist()]
        assert sorted(tile for tile in got if tile[1]) == wanted
        assert all(tile == (0, 0, 0) for tile in got[len(wanted) :])


def test_the_host_counts_enough_tiles():
    """For every pass; some passes need all of them."""
    random = torch.Generator().manual_seed(0)
    tight = 0
    for _ in range(500):
        runs, groups = (int(torch.randint(1, most, (), generator=random)) for most in (9, 9))
        m = (16, 64)[int(torch.randint(2, (), generator=random))]
        counts = torch.randint(0, 40, (runs,), generator=random).tolist()
        needed = len(tiles_by_hand([(0, count) for count in counts], groups, m))
        room = triton_tiles.most_tiles(max(1, sum(counts)), runs, groups, m)
        assert needed <= room
        tight += needed == room
    assert tight > 10


@pytest.mark.parametrize("places", [[4, 1, 2], [2, 4, 0]])
def test_rows_at_places_of_a_larger_cache(places):
    """Rows read where their lines say; in a cache of their own they would get the same."""
    drafts, rows = random_trees(2, 6), ([(5, 6), (19, 4)], [(8, 7)])
    flat, alone = (mixture(*rows, places=at, drafts=drafts) for at in (places, None))
    cache, query = random_cache(flat, 2, 16), random_query(flat, 4, 16)
    want = expected(query, cache[:, places], alone)
    for got in (expected(query, cache, flat), attended(query, cache, flat)):
        check(got, want)
    cache = torch.randn_like(cache)
    turned = mixture(*rows, places=[*places[1:], places[0]], drafts=drafts)
    right, wrong = (attended(query, cache, some) for some in (flat, turned))
    assert not torch.isclose(right, wrong, atol=1e-2).all(-1).any(), "twin: at each other's places"


@pytest.mark.parametrize("window", [None, 1, 3, 25])
def test_what_lines_show(window):
    """Against the definition: the text, the ancestors, and as far back as the window reaches."""
    depths, mask = random_trees(2, 20)
    flat = mixture([(3, 20), (40, 20)], [(10, 9)], window, drafts=(depths, mask))
    got = naive.visible(flat.lines, 70)
    slot = torch.arange(70, device=DEVICE)
    for token in range(9):
        assert torch.equal(got[token], (slot <= 10 + token) & (10 + token - slot < (window or 70))), "a piece"
    for row, length in enumerate((3, 40)):
        lines = slice(9 + 20 * row, 29 + 20 * row)
        index = torch.cat([slot[:length], length + depths[row]])
        seen = torch.cat([torch.ones(20, length, dtype=torch.bool, device=DEVICE), mask[row]], dim=1)
        seen &= (length + depths[row])[:, None] - index < (window or 1 << 40)
        assert torch.equal(got[lines, : length + 20], seen)
        assert not got[lines, length + 20 :].any()
    assert not got[49:].any(), "padding sees nothing"


def test_padding_changes_nothing():
    """A token has the same bits with any number of padded lines, whatever is in them, and of empty runs."""
    drafts, rows = random_trees(1, 5), ([(20, 5)], [(0, 4)])
    flat, more = (mixture(*rows, drafts=drafts, padding=padding) for padding in (0, 17))
    more.lines[9:, :SLOT] = 3  # an index and a place of a real row, but no slot
    more = Flat(more.lines, more.runs[[2, 0, 2, 1, 2]])
    cache, query = random_cache(flat, 1, 16), random_query(flat, 2, 16)
    want = attended(query, cache, flat)
    longer = random_query(more, 2, 16)
    longer[:9] = query
    assert torch.equal(attended(longer, cache, more), want)
    check(want, expected(query, cache, flat))
    cache = cache.nan_to_num()
    more.lines[8, SLOTS] = int(more.lines[8, SLOT]) + 1  # where padding would have written a key
    assert not torch.allclose(attended(longer, cache, more)[8], want[8], atol=1e-4), "twin: a padded token that is seen"


def test_twin_a_mask_of_the_neighbours_row_differs():
    depths, mask = random_trees(2, 6)
    right, wrong = (mixture([(4, 6), (30, 6)], drafts=(depths, some)) for some in (mask, mask.flip(0)))
    cache, query = random_cache(right, 2, 16), random_query(right, 2, 16)
    want = expected(query, cache, right)
    check(attended(query, cache, right), want)
    assert not torch.allclose(attended(query, cache, wrong), want, atol=1e-2)


LENGTHS = (0, 5, *BORDERS[1:], 512, 513, 527, 528, 2064, 4095, 4112) if BIG else (140,)
MODELS = [(8, 8, 128), (8, 2, 64), (4, 2, 256)] if BIG else [(2, 1, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if BIG else [torch.float32])
@pytest.mark.parametrize("window", [None, 40, 600] if BIG else [None, 40])
@pytest.mark.parametrize(("heads", "kv", "size"), MODELS)
def test_a_token_has_the_same_bits_in_every_mixture(dtype, window, heads, kv, size):
    """A path of a tree, beside other rows; then, with its keys in the slots that plain decoding gives them, its tokens
    as a piece, as rows, beside a piece, and alone."""
    n = 64 if BIG else 7
    drafts = random_trees(2, n, deep=6)
    path = drafts[1][0, int(drafts[0][0].argmax())].nonzero()[:, 0]
    every, twins = list(range(len(path))), []
    for length in LENGTHS:
        flat = mixture([(length, n), (33, 3)], [(0, 20)], window, places=[2, 0, 1], drafts=drafts)
        cache, query = random_cache(flat, kv, size, dtype), random_query(flat, heads, size, dtype)
        want = attended(query, cache, flat)[20 + path]
        plain = cache.clone()
        plain[:, 0, :, length : length + len(path)] = cache[:, 0, :, length + path]
        plain[:, 0, :, length + len(path) :] = float("nan")

        def read(some, cache, tokens, query=query):
            """The last tokens of a pass are these of the path."""
            whole = random_query(some, heads, size, dtype)
            whole[-len(tokens) :] = query[20 + path[tokens]]
            return attended(whole, cache, some)[-len(tokens) :]

        piece = mixture([], [(length, len(path))], window, padding=0)
        assert torch.equal(read(piece, plain, every), want), f"{length}: a piece"
        rows = mixture([(length + i, 1) for i in every], [], window, padding=0)
        assert torch.equal(read(rows, plain[:, [0] * len(path)], every), want), f"{length}: rows"
        beside = mixture([(length + 1, 1)], [(0, 20)], window, places=[2, 0], padding=0)
        assert torch.equal(read(beside, plain, [1]), want[1:2]), f"{length}: beside a piece"
        for i in every if BIG else every[-1:]:
            alone = mixture([(length + i, 1)], [], window, padding=0)
            assert torch.equal(read(alone, plain, [i]), want[i : i + 1]), f"{length}: alone"
        alone.lines[0, SLOTS:] = alone.lines[0, SLOTS:].flip(0)  # twin: the newest keys in another order
        other = read(alone, plain, every[-1:])
        check(other, want[-1:], dtype)
        twins.append(torch.equal(other, want[-1:]))
    assert not all(twins)
