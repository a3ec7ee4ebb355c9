"""The papers' kernels against their oracle."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.bench import paper_kernels
from redrafter.bench.paper_kernels import naive, triton
from tests.helpers.verification import drafted

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, warns of every overflow
    pytest.mark.filterwarnings("ignore:.*FP_FUSION.*"),  # Triton, of a default that will change
]


@pytest.mark.parametrize("scale", [None, paper_kernels.SPEECH], ids=["exact", "sigmoid"])
def test_paper_tiles(scale):
    target, draft, _, _ = drafted(2, 3, 1500)
    if scale is None:
        target, draft = target.softmax(-1), draft.softmax(-1)
    want, got = naive.tiles(target, draft, scale), triton.tiles(target, draft, scale)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
