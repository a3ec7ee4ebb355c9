"""The seeded rule's kernel against the core, same seeds: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter import kernels
from redrafter.core import noise
from redrafter.core.rules.seeded import accept_seeded
from redrafter.core.tree import Nodes, pack
from redrafter.kernels import verify as operators
from redrafter.kernels.verify import triton as kernel
from tests.helpers.verification import BIG, DEVICE, DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, warns of every overflow
    pytest.mark.filterwarnings("ignore:.*FP_FUSION.*"),  # Triton, of a default that will change
]


def random_tree(batch: int, nodes: int, vocab: int):
    """Trees of random shape, the last node of each row empty."""
    parents = torch.tensor([[int(torch.randint(max(0, i - 3), i + 1, ())) for i in range(nodes)] for _ in range(batch)])
    depths = torch.zeros(batch, nodes + 1, dtype=torch.long)
    for i in range(nodes):
        depths[:, i + 1] = depths.gather(1, parents[:, i : i + 1])[:, 0] + 1
    scores = -torch.arange(1.0, nodes + 1).repeat(batch, 1)
    scores[:, -1] = -torch.inf
    tokens = torch.randint(0, vocab, (batch, nodes))
    nodes_ = Nodes(*(x.to(DEVICE) for x in (tokens, parents, depths[:, 1:], scores)), length=int(depths.max()))
    return pack(nodes_, torch.zeros(batch, dtype=torch.long, device=DEVICE), nodes)[0]


def oracle_gumbel(*args, **options):
    """The noise as torch computes it, on a GPU too."""
    with kernels.force("naive"):
        return noise.gumbel(*args, **options)


@pytest.mark.parametrize("vocab", [1, 5000])
def test_all_gumbel_noise_is_the_cores(both, vocab):
    seeds = torch.tensor([[0, 1], [-7, 1], [2**62, 1]], device=DEVICE)[:, 0]
    where = torch.tensor([[0, 5, 9], [100_000, 7, 2], [1, 2, 3]], device=DEVICE).t()
    for stream in (noise.SEEDED, noise.RESIDUAL):
        want, got = both(noise.gumbel, seeds, where, vocab, stream=stream, dtype=torch.float32)
        assert got.shape == (3, 3, vocab)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(got, oracle_gumbel(seeds + 1, where, vocab, stream=stream, dtype=torch.float32))
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.gumbel, (seeds, where, vocab, noise.SEEDED), test_utils=names)


TREES = [(1, 1, 257), (2, 11, 257), (3, 5, 1000)]
LARGE_TREES = [(1, 40, 128256), (16, 12, 49152), (2, 64, 151936)]


@pytest.mark.parametrize(("case", "dtype"), [*zip(TREES + LARGE_TREES * BIG, DTYPES * (1 + BIG), strict=True)], ids=str)
def test_seeded_chooses_what_the_core_chooses(both, case, dtype):
    batch, n, vocab = case
    torch.manual_seed(n)
    tree = random_tree(batch, n, vocab)
    logits = (torch.randn(batch, n + 1, vocab, device=DEVICE) * 3).to(dtype)
    heat = torch.tensor([0.7, 0.0, 1.3] * batch, device=DEVICE)[:batch]
    seeds, at = torch.arange(batch, device=DEVICE) * 77 - 5, torch.arange(batch, device=DEVICE) * 3
    ahead = at[:, None] + 1 + torch.arange(tree.length + 1, device=DEVICE)
    g = oracle_gumbel(seeds, ahead, vocab, stream=noise.SEEDED, dtype=torch.float32)
    g = torch.where(heat[:, None, None] > 0, g, 0.0)
    scores = logits.float() / torch.where(heat > 0, heat, 1.0)[:, None, None]
    choice = (scores + g.gather(1, tree.depths[:, :, None].expand_as(scores))).argmax(-1)
    mine = kernel.seeded(logits, tree.depths, heat, seeds, at, None, noise.SEEDED)
    assert (mine == choice).float().mean() >= (0.99 if BIG else 1.0)
    # Guess what the target will choose, so that paths are long; then the whole rule.
    tree.tokens[:, 1:] = choice.gather(1, tree.parents)[:, 1:]
    want = accept_seeded(choice, tree)
    for chosen in both(operators.seeded, logits, tree.depths, heat, seeds, at, None, noise.SEEDED, lambda: g):
        found = accept_seeded(chosen, tree)
        assert (found.count == want.count).all()
        assert (found.path == want.path).all()
        assert (found.tokens == want.tokens).float().mean() >= (0.99 if BIG else 1.0)


def test_seeded_floor_and_strides(both):
    tree = random_tree(2, 6, 300)
    logits = torch.randn(2, 300, 7, device=DEVICE).transpose(1, 2)
    floor = logits.topk(5).values[..., -1]
    rows = [x.to(DEVICE) for x in (torch.full((2,), 3.0), torch.tensor([1, 2]), torch.tensor([4, 9]))]
    ahead = rows[2][:, None] + 1 + torch.arange(tree.length + 1, device=DEVICE)
    g = oracle_gumbel(rows[1], ahead, 300, stream=noise.SEEDED, dtype=torch.float32)
    want, got = both(operators.seeded, logits, tree.depths, *rows, floor, noise.SEEDED, lambda: g)
    assert torch.equal(want, got)
    assert (logits.topk(5).indices == got[..., None]).any(-1).all()


def test_twin_another_seed_or_stream_chooses_otherwise():
    logits = torch.randn(2, 6, 300, device=DEVICE)
    depths = torch.arange(6, device=DEVICE).expand(2, -1)
    heat, seeds, at = torch.ones(2, device=DEVICE), *torch.zeros(2, 2, dtype=torch.long, device=DEVICE)
    one = kernel.seeded(logits, depths, heat, seeds, at, None, noise.SEEDED)
    assert not torch.equal(one, kernel.seeded(logits, depths, heat, seeds + 1, at, None, noise.SEEDED))
    assert not torch.equal(one, kernel.seeded(logits, depths, heat, seeds, at, None, noise.DRAFT))
