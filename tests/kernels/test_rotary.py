"""Head norms, rotation and the write to the KV cache against their oracle, in Triton's interpreter or on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels.rotary import HeadNorms, Heads, naive
from redrafter.kernels.rotary import triton as kernel
from redrafter.kernels.tree_attention.naive import PLACE, SLOT, padding

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
CASES = [  # tokens, heads, kv heads, D, rotated
    (1, 2, 2, 16, 16),
    (4, 4, 2, 24, 24),
    (4, 3, 1, 32, 8),
]
LARGE = [(64, 32, 32, 128, 128), (192, 32, 8, 128, 128), (18, 8, 4, 256, 256), (10, 32, 32, 96, 72)]


def random_lines(tokens: int) -> torch.Tensor:
    """Lines of tokens in some slots of three places, and one line of padding in the middle."""
    lines = padding(tokens + 1, DEVICE)
    at = torch.randperm(3 * (tokens + 5), device=DEVICE)[:tokens]
    real = torch.arange(tokens + 1, device=DEVICE) != tokens // 2
    lines[real, PLACE], lines[real, SLOT] = at // (tokens + 5), at % (tokens + 5)
    return lines


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("case", CASES + (LARGE if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("norms", ["none", "head", "all"])
def test_rotate(case, dtype, count, norms, monkeypatch):
    tokens, queries, kv, size, turned = case
    if not BIG:
        monkeypatch.setattr(kernel, "ELEMENTS", 64)  # several programs per token
    torch.manual_seed(size)
    made = None
    if norms != "none":
        wide = (1, 1) if norms == "head" else (queries, kv)
        scales = (random(heads * size, dtype=dtype) for heads in wide)
        made = HeadNorms(*scales, offset=float(norms == "head"), eps=1e-5)
    heads, lines = Heads(queries, kv, size, made), random_lines(tokens)
    parts = random(count, len(lines), (queries + 2 * kv) * size, dtype=dtype if count == 1 else torch.float32)
    angles = random(1 if case is CASES[-1] else len(lines), turned // 2).repeat(1, 2)
    cos, sin = (a.to(dtype).expand(len(lines), -1) for a in (angles.cos(), angles.sin()))
    cache = random(2, 3, kv, tokens + 5, size, dtype=dtype)  # keys and values
    theirs, mine = cache.clone(), cache.clone()
    want = naive.rotate(parts, cos, sin, heads, *theirs, lines)
    got = kernel.rotate(parts, cos, sin, heads, *mine, lines)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert got.shape == (len(lines), queries, size)
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(mine, theirs, **close)
    real = lines[lines[:, SLOT] >= 0]
    written = torch.zeros(cache.shape[1:4:2], dtype=torch.bool, device=DEVICE)  # place, slot
    written[real[:, PLACE], real[:, SLOT]] = True
    same = (mine == cache).all(-1).all(2).all(0)
    assert torch.equal(same, ~written), "the tokens' slots are written and no others"

    other = naive.rotate(parts, cos, -sin, heads, *theirs, lines)
    assert not torch.allclose(got, other, **close), "twin: rotated backwards"
    assert not torch.allclose(mine[0], theirs[0], **close)
    assert torch.allclose(mine[1], theirs[1], **close), "values are not rotated"
    if made is not None:
        scaled = heads._replace(norms=made._replace(offset=0.5))
        assert not torch.allclose(got, naive.rotate(parts, cos, sin, scaled, *theirs, lines), **close)
    elsewhere = lines.clone()
    elsewhere[lines[:, SLOT] >= 0, PLACE] = (real[:, PLACE] + 1) % 3
    theirs.copy_(cache)
    naive.rotate(parts, cos, sin, heads, *theirs, elsewhere)
    assert not torch.allclose(mine[1], theirs[1], **close), "twin: another row's place"
    elsewhere = lines.clone()
    elsewhere[tokens // 2, SLOT] = (~written[0]).nonzero()[0, 0]
    kernel.rotate(parts, cos, sin, heads, *mine, elsewhere)
    assert not torch.equal((mine == cache).all(-1).all(2).all(0), ~written), "twin: padding with a slot"


@pytest.mark.parametrize("wide", [0, 1, 8], ids=["no norms", "head norms", "a norm of all heads"])
def test_a_token_has_the_same_bits_in_every_pass(wide):
    count, size = (64, 128) if BIG else (5, 16)
    dtype = torch.bfloat16 if BIG else torch.float32
    norms = HeadNorms(random(wide * size), random(wide * size), 0.0, 1e-5) if wide else None
    heads = Heads(8, 8, size, norms)
    parts, angles = random(2, count, 24 * size), random(count, size)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cache = torch.zeros(2, 1, 8, 3 * count, size, device=DEVICE, dtype=dtype)
    lines = padding(count, DEVICE)
    lines[:, SLOT] = torch.arange(count, device=DEVICE) + count
    together = kernel.rotate(parts, cos, sin, heads, *cache, lines)
    for i in range(count):
        one = slice(i, i + 1)
        lines[i, SLOT] = i
        alone = kernel.rotate(parts[:, one].contiguous(), cos[one], sin[one], heads, *cache, lines[one])
        assert torch.equal(alone[0], together[i])
    assert torch.equal(cache[:, :, :, :count], cache[:, :, :, count : 2 * count])
    assert cache[:, :, :, 2 * count :].eq(0).all()
    other = kernel.rotate(parts[:, 1:2].contiguous(), cos[:1], sin[:1], heads, *cache, lines[1:2])
    assert not torch.equal(other[0], together[1]), "twin: another position"
