"""Inputs for the tests of verification kernels."""

import torch

from redrafter.core import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIG = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drafted(batch, gamma, vocab, *, temperature=(1.0,), dtype=torch.float32, apart=1.0):
    """Logits, tokens sampled from the draft's with the stream for drafting, and all that verification needs besides."""
    torch.manual_seed(vocab + gamma)
    target = (torch.randn(batch, gamma + 1, vocab, device=DEVICE) * 2).to(dtype)
    draft = (target[:, :gamma].float() + torch.randn(batch, gamma, vocab, device=DEVICE) * apart).to(dtype)
    heat = torch.tensor((*temperature,) * batch, device=DEVICE)[:batch]
    rows = {
        "counts": torch.full((batch,), gamma, device=DEVICE),
        "temperature": heat,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE),
        "positions": torch.randint(0, 5000, (batch,), device=DEVICE),
    }
    ahead = rows["positions"][:, None] + 1 + torch.arange(gamma, device=DEVICE)
    g = noise.gumbel(rows["seeds"], ahead, vocab, stream=noise.DRAFT, dtype=torch.float32)
    hot = heat[:, None, None] > 0
    tokens = torch.where(hot, draft.float() / torch.where(hot, heat[:, None, None], 1) + g, draft.float()).argmax(-1)
    return target, draft, tokens, rows
