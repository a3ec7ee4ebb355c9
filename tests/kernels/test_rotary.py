"""Head norms, rotation and the write to the KV cache against their oracle, in Triton's interpreter or on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels.rotary import HeadNorms, Heads, naive
from redrafter.kernels.rotary import triton as kernel
from redrafter.kernels.tree_attention.naive import pack_mask

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
CASES = [  # B, n, heads, kv heads, D, rotated
    (1, 1, 2, 2, 16, 16),
    (2, 2, 4, 2, 24, 24),
    (2, 2, 3, 1, 32, 8),
]
LARGE = [(1, 64, 32, 32, 128, 128), (3, 64, 32, 8, 128, 128), (2, 9, 8, 4, 256, 256), (2, 5, 32, 32, 96, 72)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("case", CASES + (LARGE if BIG else []), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if BIG else [torch.float32])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("norms", ["none", "head", "all"])
def test_rotate(case, dtype, count, norms, monkeypatch):
    batch, n, queries, kv, size, turned = case
    if not BIG:
        monkeypatch.setattr(kernel, "ELEMENTS", 64)  # several programs per token
    torch.manual_seed(size)
    made = None
    if norms != "none":
        wide = (1, 1) if norms == "head" else (queries, kv)
        scales = (random(heads * size, dtype=dtype) for heads in wide)
        made = HeadNorms(*scales, offset=float(norms == "head"), eps=1e-5)
    heads = Heads(queries, kv, size, made)
    parts = random(count, batch * n, (queries + 2 * kv) * size, dtype=dtype if count == 1 else torch.float32)
    angles = random(1 if case is CASES[-1] else batch, n, turned // 2).repeat(1, 1, 2)
    cos, sin = (a.to(dtype).expand(batch, -1, -1) for a in (angles.cos(), angles.sin()))
    places = torch.arange(batch, device=DEVICE).flip(0) + 1
    depths = torch.arange(n, device=DEVICE).expand(batch, -1)
    lengths = torch.arange(batch, device=DEVICE) * 2 + 3
    packed = pack_mask(lengths, depths, None, None, places)
    cache = random(2, batch + 2, kv, n + batch * 2 + 5, size, dtype=dtype)  # keys and values
    theirs, mine = cache.clone(), cache.clone()
    want = naive.rotate(parts, cos, sin, heads, *theirs, packed)
    got = kernel.rotate(parts, cos, sin, heads, *mine, packed)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert got.shape == (batch, n, queries, size)
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(mine, theirs, **close)
    written = torch.zeros(cache.shape[1:4:2], dtype=torch.bool, device=DEVICE)  # place, slot
    for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
        written[place, length : length + n] = True
    same = (mine == cache).all(-1).all(2).all(0)
    assert torch.equal(same, ~written), "the nodes' slots are written and no others"

    other = naive.rotate(parts, cos, -sin, heads, *theirs, packed)
    assert not torch.allclose(got, other, **close), "twin: rotated backwards"
    assert not torch.allclose(mine[0], theirs[0], **close)
    assert torch.allclose(mine[1], theirs[1], **close), "values are not rotated"
    if made is not None:
        scaled = heads._replace(norms=made._replace(offset=0.5))
        assert not torch.allclose(got, naive.rotate(parts, cos, sin, scaled, *theirs, packed), **close)
    swapped = pack_mask(lengths, depths, None, None, places.flip(0))
    naive.rotate(parts, cos, sin, heads, *theirs, swapped)
    assert batch == 1 or not torch.allclose(mine[1], theirs[1], **close), "twin: rows at each other's places"


@pytest.mark.skipif(not BIG, reason="needs a GPU")
@pytest.mark.parametrize("wide", [0, 1, 8], ids=["no norms", "head norms", "a norm of all heads"])
def test_a_token_has_the_same_bits_in_every_pass(wide):
    heads = Heads(8, 8, 128, HeadNorms(random(wide * 128), random(wide * 128), 0.0, 1e-5) if wide else None)
    parts, angles = random(2, 64, 24 * 128), random(1, 64, 128)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    cache = torch.zeros(2, 1, 8, 200, 128, device=DEVICE, dtype=torch.bfloat16)
    depths = torch.arange(64, device=DEVICE)[None]
    together = kernel.rotate(parts, cos, sin, heads, *cache, pack_mask(depths[:, 0] + 100, depths, None))
    for i in range(64):
        at = torch.tensor([i], device=DEVICE)
        packed = pack_mask(at, depths[:, :1], None)
        part, c, s = parts[:, i : i + 1].contiguous(), cos[:, i : i + 1], sin[:, i : i + 1]
        alone = kernel.rotate(part, c, s, heads, *cache, packed)
        assert torch.equal(alone[0, 0], together[0, i])
    assert torch.equal(cache[:, :, :, :64], cache[:, :, :, 100:164])
    assert cache[:, :, :, 64:100].eq(0).all()
