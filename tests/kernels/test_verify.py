"""The rejection rule's kernel against its oracle, same seeds: in Triton's interpreter on a CPU, for real on a GPU."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.core import noise
from redrafter.core.rules.rejection import rejection_from_logits
from redrafter.kernels import verify as operators
from redrafter.kernels.verify import triton as kernel
from tests.helpers.verification import BIG, DEVICE, DTYPES, drafted

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, warns of every overflow
    pytest.mark.filterwarnings("ignore:.*FP_FUSION.*"),  # Triton, of a default that will change
]


def agree(found):
    """The same tokens; on a GPU a number within rounding of a threshold may fall either way, now and then."""
    (want, accepted), (got, mine) = found
    real = torch.arange(want.shape[1], device=want.device) <= accepted[:, None]
    same = (accepted == mine) & ((want == got) | ~real).all(1)
    assert same.float().mean() >= (0.98 if BIG else 1.0)
    return accepted


MANY = 9001
"""A vocabulary of three spans, the last one and its last cell not full."""
SMALL = [(1, 1, 257), (3, 5, 257), (2, 6, 5000)]
LARGE = [
    (batch, gamma, vocab)
    for vocab in (257, 32000, 49152, 128256, 151936)
    for batch, gamma in ((1, 5), (16, 20), (64, 5))
]


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip(SMALL, DTYPES, strict=True), *((c, d) for c in LARGE * BIG for d in DTYPES)], ids=str
)
def test_fused(both, case, dtype):
    target, draft, tokens, rows = drafted(*case, temperature=(1.0, 0.6, 1.4), dtype=dtype, apart=0.5)
    agree(both(rejection_from_logits, target, draft, tokens, **rows))


def test_fused_of_two_types(both):
    target, draft, tokens, rows = drafted(3, 2, 257, apart=0.5)
    agree(both(rejection_from_logits, target, draft.half(), tokens, **rows))


@pytest.mark.skipif(not BIG, reason="needs a GPU")
def test_fused_in_a_graph():
    """Recording fails where the host is waited for; a replay reads what the tensors hold then."""
    target, draft, tokens, rows = drafted(4, 5, 32000, dtype=torch.bfloat16, apart=0.5)
    rejection_from_logits(target, draft, tokens, **rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rejection_from_logits(target, draft, tokens, **rows)
    for _ in range(3):
        rows["seeds"] += 1
        graph.replay()
        want = rejection_from_logits(target, draft, tokens, **rows)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_fused_counts_of_all_kinds(both):
    target, draft, tokens, rows = drafted(8, 4, MANY, apart=0.3)
    rows["counts"] = torch.tensor([0, 1, 2, 3, 4, 4, 0, 2], device=DEVICE)
    accepted = agree(both(rejection_from_logits, target, draft, tokens, **rows))
    assert (accepted <= rows["counts"]).all()
    assert accepted[4:6].max() > 0


def test_fused_minds_nothing_behind_a_stop(both):
    target, draft, tokens, rows = drafted(5, 3, 257, temperature=(1.0, 0.0), apart=2.0)
    rows["counts"][3] = 2
    found = both(rejection_from_logits, target, draft, tokens, **rows)
    accepted = agree(found)
    assert accepted.min() == 0
    assert accepted.max() > 0
    depth = torch.arange(4, device=DEVICE)

    def garbled(places):
        given = [torch.where(places[:, :n, None], 9 * torch.randn_like(x), x) for x, n in ((target, 4), (draft, 3))]
        return both(rejection_from_logits, *given, tokens, **rows)[1]

    agree([found[0], garbled(depth > accepted[:, None])])
    with pytest.raises(AssertionError):
        agree([found[0], garbled(depth == accepted[:, None])])


def test_fused_with_nothing_drafted(both):
    target, draft, tokens, rows = drafted(3, 0, 300)
    assert agree(both(rejection_from_logits, target, draft, tokens, **rows)).tolist() == [0, 0, 0]


def test_fused_at_temperature_0_is_greedy(both):
    target, draft, tokens, rows = drafted(4, 3, MANY, temperature=(0.0, 1.0))
    # Equal best logits, of one cell and of two spans: the first of them.
    for place, best in enumerate(([5, 8, 1029], [70, 5000], [4095, 4096], [1024, 2048, 5000])):
        target[:, place, best] = 99.0
    target = target.bfloat16()
    tokens[2] = target[2, :3].float().argmax(-1)
    found = both(rejection_from_logits, target, draft, tokens, **rows)
    accepted = agree(found)
    assert accepted[2] == 3
    best = target.float().argmax(-1)
    for row in (0, 2):
        n = int(accepted[row])
        assert found[1][0][row, : n + 1].tolist() == best[row, : n + 1].tolist()


def test_fused_accepts_all_where_p_is_q(both):
    target, _, tokens, rows = drafted(6, 5, 300, temperature=(1.0, 0.3))
    accepted = agree(both(rejection_from_logits, target, target[:, :5].clone(), tokens, **rows))
    assert (accepted == 5).all()


def test_fused_draws_from_p_where_q_leaves_nothing(both):
    """A guess that q itself excludes is refused; with p = q nothing is left of p then, so p it is."""
    target, _, tokens, rows = drafted(5, 2, MANY)
    target.scatter_(2, tokens[..., None], -torch.inf)
    accepted = agree(both(rejection_from_logits, target, target[:, :2].clone(), tokens, **rows))
    assert (accepted == 0).all()


def test_fused_at_temperatures_next_to_0(both):
    """Logits over T are then so large that their own rounding must not be taken for a difference."""
    target, draft, tokens, rows = drafted(4, 3, 3000, temperature=(1e-9, 1e-7, 1e-12, 1e-30))
    tops = torch.tensor([80.0, 77.7, 61.3, 90.1], device=DEVICE)
    target[:, :, 7], draft[:2, :, 7] = tops, tops[:3]
    tokens[:2] = 7
    accepted = agree(both(rejection_from_logits, target, draft, tokens, **rows))
    assert accepted.tolist()[:2] == [3, 3]


def test_fused_at_temperature_0_takes_a_logit_of_0(both):
    """Its word has no bit but the one that says that it is there."""
    target, draft, _, rows = drafted(2, 2, 300, temperature=(0.0,))
    target, tokens = torch.full_like(target, -1.0), torch.zeros(2, 2, dtype=torch.long, device=DEVICE)
    target[..., 0] = 0.0
    accepted = agree(both(rejection_from_logits, target, draft, tokens, **rows))
    assert (accepted == 2).all()


def test_fused_vocabulary_of_many_spans(both):
    """More than a program has threads; the best is in the last of them."""
    target, draft, tokens, rows = drafted(1, 1, 530_001)
    target[:, :, -3:] += 30.0
    draft[:, :, -2:] += 30.0
    tokens[:] = 530_000
    agree(both(rejection_from_logits, target, draft, tokens, **rows))


@pytest.mark.skipif(not BIG, reason="needs a GPU: programs run at the same time")
@pytest.mark.parametrize("apart", [0.3, 1.0, 3.0])
def test_fused_of_many_rows_that_stop_anywhere(both, apart):
    for more in range(20):  # a vocabulary's inputs are always the same
        kind = {"temperature": (1.0, 0.0, 0.6), "dtype": torch.bfloat16, "apart": apart}
        target, draft, tokens, rows = drafted(64, 20, 32000 + more, **kind)
        rows["counts"] = torch.randint(0, 21, (64,), device=DEVICE)
        agree(both(rejection_from_logits, target, draft, tokens, **rows))


def test_fused_refuses_a_guess_that_q_excludes(both):
    target, draft, tokens, rows = drafted(5, 2, 300)
    draft.scatter_(2, tokens[..., None], -torch.inf)
    accepted = agree(both(rejection_from_logits, target, draft, tokens, **rows))
    assert (accepted == 0).all()


def test_fused_where_floors_exclude_the_guess(both):
    target, _, tokens, rows = drafted(5, 2, 300)
    target[..., 7], tokens[:] = 9.0, 7
    target[..., 8] = 10.0
    floors = (torch.full((5, 3), 9.5, device=DEVICE), torch.full((5, 2), -9.0, device=DEVICE))
    found = both(rejection_from_logits, target, target[:, :2].clone(), tokens, floors=floors, **rows)
    assert (agree(found) == 0).all()
    assert (found[1][0][:, 0] == 8).all()
    # And what is below q's takes nothing from p.
    target[..., 8:28], draft = 10.0, target[:, :2].clone()
    draft[..., 8:18], draft[..., 7], floors[1][:] = 11.0, 12.0, 11.5
    found = both(rejection_from_logits, target, draft, tokens, floors=floors, **rows)
    assert (agree(found) == 0).all()
    assert (found[1][0][:, 0] < 18).any()


def test_fused_where_q_leaves_something_in_one_span_only(both):
    """There the other spans offer p as well, which must not count."""
    target, _, tokens, rows = drafted(6, 2, MANY)
    draft = target[:, :2].clone()
    draft.scatter_(2, tokens[..., None], 12.0)  # q above p at the guess, and p above q elsewhere
    draft[..., 4096:8192] = target[:, :2, 4096:8192] + 9
    agree(both(rejection_from_logits, target, draft, tokens, **rows))


def test_fused_what_follows_a_refusal_does_not_count(both):
    """Whether or not it is read."""
    target, draft, tokens, rows = drafted(5, 3, 3000, apart=1.0)
    new, accepted = both(rejection_from_logits, target, draft, tokens, **rows)[1]
    assert len(accepted.unique()) > 2
    after = torch.arange(4, device=DEVICE) > accepted[:, None]
    target[after], draft[after[:, :3]] = torch.nan, torch.nan
    again = both(rejection_from_logits, target, draft, tokens, **rows)[1]
    assert (again[1] == accepted).all()
    assert (again[0] == new).all()
    target[after.logical_not()] = torch.nan  # what comes before it does count
    assert (both(rejection_from_logits, target, draft, tokens, **rows)[1][1] == 0).all()


@pytest.mark.skipif(BIG, reason="needs no GPU: there, programs that run at the same time may have begun to read")
@pytest.mark.parametrize("late", [False, True])
def test_fused_reads_a_row_no_further_than_it_stops(both, monkeypatch, late):
    """If it is judged in time. Else it is read on in vain, and drawn from all the same."""
    seen, looks = kernel._seen, itertools.cycle((0, 1))
    if late:  # every other look at a verdict finds none yet
        monkeypatch.setattr(kernel, "_seen", lambda word: seen(word) * next(looks))
    batch, gamma = 5, 3
    target, draft, tokens, rows = drafted(batch, gamma, MANY, temperature=(1.0, 0.0), apart=0.3)
    rows["counts"][4] = 2
    made, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: made.append(zeros(*a, **k)) or made[-1])
    accepted = agree(both(rejection_from_logits, target, draft, tokens, **rows))
    assert len(accepted.unique()) > 2
    words = next(w for w in made if w.dtype == torch.long and len(w) > batch)
    of_place = 2 * 3 + 2  # words: three spans of p and three of q, and two more
    of_places, offers = words.split([batch * gamma * of_place, len(words) - batch * gamma * of_place])
    shares, place = of_places.view(batch, gamma, of_place)[..., :6] != 0, torch.arange(gamma)
    read = (place < rows["counts"][:, None]) & ((place <= accepted[:, None]) | late)
    assert (shares == read[..., None]).all()
    assert (offers != 0).all()


def test_fused_of_no_numbers_is_a_token(both):
    target, draft, tokens, rows = drafted(4, 2, MANY)
    new, accepted = both(rejection_from_logits, target * torch.nan, draft, tokens, **rows)[1]
    assert (new >= 0).all()
    assert (new < MANY).all()
    assert (accepted <= 2).all()


@pytest.mark.parametrize("who", ["target", "draft", "both"])
def test_fused_one_hot_rows(both, who):
    target, draft, tokens, rows = drafted(6, 3, 300)
    for logits in {"target": [target], "draft": [draft], "both": [target, draft]}[who]:
        sharp = torch.full_like(logits, -torch.inf)
        index = torch.randint(0, 300, logits.shape[:2], device=DEVICE)
        index[::2, :3] = tokens[::2]
        logits.copy_(sharp.scatter(2, index[..., None], 7.0))
    if who != "target":
        tokens = draft.argmax(-1)
    agree(both(rejection_from_logits, target, draft, tokens, **rows))


def test_fused_floors_and_strides(both):
    target, draft, tokens, rows = drafted(6, 3, MANY, temperature=(0.8, 1.2), apart=0.5)
    draft[:3] = target[:3, :3]  # all accepted: p's last row is drawn from, under its floor
    target[:3, 3] /= 10  # where what lies below it would often win
    wide = torch.full((6, 8, 2 * MANY + 9), torch.nan, device=DEVICE)
    wide[:, 1:5, ::2][..., :MANY] = target
    target = wide[:, 1:5, ::2][..., :MANY]
    draft = draft.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    tokens = tokens.t().contiguous().t()
    floors = (target.topk(20).values[..., -1], draft.topk(20).values[..., -1])
    tokens = torch.where(draft.gather(2, tokens[..., None])[..., 0] < floors[1], draft.argmax(-1), tokens)
    found = both(rejection_from_logits, target, draft, tokens, floors=floors, **rows)
    accepted = agree(found)
    assert (accepted[:3] == 3).all()
    drawn = found[1][0].gather(1, accepted[:, None])
    there = target[torch.arange(6), accepted].gather(1, drawn)[:, 0]
    assert (there >= floors[0][torch.arange(6), accepted]).all()


def test_operators_say_what_shapes_they_give():
    target, draft, tokens, rows = drafted(2, 2, 100)
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operators.fused_operator,
        (target, draft, tokens, *rows.values(), None, None, noise.ACCEPT, noise.RESIDUAL),
        test_utils=names,
    )
    depths = torch.arange(3, device=DEVICE).expand(2, -1)
    _, *of_rows = rows.values()
    torch.library.opcheck(operators.seeded_operator, (target, depths, *of_rows, None, noise.SEEDED), test_utils=names)
