"""What filters keep, by the kernel that does not sort: just what the sorted row says, in Triton's interpreter too."""

import dataclasses

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIG = DEVICE == "cuda"

pytest.importorskip("triton", reason="triton is not installed")

from redrafter import SamplingParams, kernels  # noqa: E402
from redrafter.core.sampling import Sampling, floor, restrict  # noqa: E402
from redrafter.kernels.verify import floors  # noqa: E402
from redrafter.kernels.verify.floors import triton as kernel  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, warns of -inf - -inf
    pytest.mark.filterwarnings("ignore:.*FP_FUSION.*"),  # Triton, of a default that will change
]

MANY = [
    SamplingParams(temperature=0.5, top_k=7),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=3.0, top_k=1),
    SamplingParams(temperature=0.0, top_k=40, top_p=0.5),
    SamplingParams(temperature=0.7, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=1.0),
    SamplingParams(temperature=2.0, top_p=0.01),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    if not BIG:
        monkeypatch.setattr(kernel, "BLOCK", 256)  # several tiles, the last one not full


@pytest.fixture
def both():
    """Floors (B, n) and scores (B, n, V), by the oracle and by the kernel."""

    def run(logits, params):
        sampling = Sampling.of(params, logits.shape[-1], DEVICE)
        found = []
        for implementation in ("naive", "triton"):
            with kernels.force(implementation):
                found.append((floor(logits, sampling), restrict(logits, sampling)))
        return found

    return run


def same(found):
    (want, scores), (got, mine) = found
    assert torch.equal(want, got)
    assert torch.equal(scores, mine)


def apart(logits, found):
    """The largest mass in any row of what one keeps and the other does not, but for one token: that at the edge."""
    kept = [scores > -torch.inf for _, scores in found]
    heat = torch.tensor([p.temperature or 1.0 for p in MANY], device=DEVICE)[:, None, None]
    mass = (logits.double() / heat).softmax(-1) * (kept[0] ^ kept[1])
    return (mass.sum(-1) - mass.amax(-1)).max()


def logits_of(rows, nodes, vocab, dtype):
    torch.manual_seed(vocab)
    return (torch.randn(rows, nodes, vocab, device=DEVICE) * 3).to(dtype)


SIZES = [(1, 300), *[(4, v) for v in (257, 49152, 128256) if BIG]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("nodes", "vocab"), SIZES)
def test_keeps_what_the_sorted_row_keeps(both, nodes, vocab, dtype):
    """Where p of the mass ends within rounding of a token, sums of another order say otherwise: not in few words.

    (The oracle in fp32 and in fp64 part there as well.)
    """
    logits = logits_of(len(MANY), nodes, vocab, dtype)
    found = both(logits, MANY)
    if vocab < 1000:
        same(found)
    assert apart(logits, found) < 1e-5


@pytest.mark.skipif(not BIG, reason="needs a GPU: a vocabulary large enough to differ")
def test_twin_another_p_is_apart(both):
    logits = logits_of(len(MANY), 1, 49152, torch.float32)
    other = [dataclasses.replace(p, top_p=p.top_p - 0.001) if p.top_p < 1 else p for p in MANY]
    assert apart(logits, [both(logits, MANY)[0], both(logits, other)[1]]) > 1e-5


def test_ties_at_the_edge_are_all_kept(both):
    logits = logits_of(3, 2, 290, torch.float32).round()  # hardly twenty different numbers
    params = [SamplingParams(temperature=1.0, top_k=9), SamplingParams(temperature=0.7, top_p=0.6)]
    params.append(SamplingParams(temperature=1.1, top_k=30, top_p=0.7))
    found = both(logits, params)
    same(found)
    assert (found[1][1] > -torch.inf)[0].sum(-1).max() > 9


def test_logits_that_dividing_makes_equal_are_kept_together(both):
    """Neighbours among fp32's numbers, over T = 1.7: several of them become one."""
    near = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)) - 1
    logits = (1.9 + near * torch.arange(40.0, device=DEVICE)).flip(0).expand(1, 1, 40).contiguous()
    kept = []
    for k in (5, 6, 7, 8):
        found = both(logits, [SamplingParams(temperature=1.7, top_k=k)])
        same(found)
        kept.append(int((found[1][1] > -torch.inf).sum()))
    assert max(n - k for n, k in zip(kept, (5, 6, 7, 8), strict=True)) > 0


def test_minus_infinity_one_hot_and_strides(both):
    logits = logits_of(3, 2, 290, torch.float32)
    logits[0, :, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[1, :, 13] = 2.5
    logits[2, 0, 4:] = -torch.inf
    params = [SamplingParams(temperature=1.0, top_k=150, top_p=0.99)]  # more than there are
    params += [SamplingParams(temperature=0.5, top_k=3, top_p=0.5), SamplingParams(temperature=0.9, top_p=0.7)]
    same(both(logits, params))
    wide = torch.full((2, 3, 580), torch.nan, device=DEVICE)
    wide[..., ::2] = logits.transpose(0, 1)
    same(both(wide[..., ::2].transpose(0, 1), params))


def test_zeros_of_both_signs(both):
    logits = torch.tensor([[[0.0, -0.0, 1.0, -1.0, -0.0, 0.0]]], device=DEVICE)
    for k in (1, 2, 4, 5):
        same(both(logits, [SamplingParams(temperature=1.0, top_k=k)]))


@pytest.mark.parametrize("change", [{"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.9}], ids=str)
def test_twin_another_filter_is_seen(both, change):
    logits = logits_of(1, 1, 300, torch.bfloat16) / 3
    given = {"temperature": 1.3, "top_k": 20, "top_p": 0.8}
    want = both(logits, [SamplingParams(**given)])[0]
    assert not torch.equal(want[0], both(logits, [SamplingParams(**given | change)])[1][0])


def test_twin_half_the_bits_are_not_enough(both, monkeypatch):
    monkeypatch.setitem(kernel.UNUSED_BITS, torch.float32, 16)
    with pytest.raises(AssertionError):
        same(both(logits_of(2, 1, 300, torch.float32), MANY[:2]))


def test_operator_says_what_shape_it_gives():
    s = Sampling.of(MANY[:2], 100, DEVICE)
    args = (logits_of(2, 3, 100, torch.bfloat16), s.temperature, s.top_k, s.top_p, s.min_p)
    torch.library.opcheck(floors.smallest_operator, args, test_utils=("test_schema", "test_faketensor"))
