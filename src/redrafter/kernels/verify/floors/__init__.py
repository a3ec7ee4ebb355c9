"""Top-k, top-p and min-p as one number per row: the smallest logit that they keep. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels.verify import runs_kernels
from redrafter.kernels.verify.floors import naive


def smallest(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, sorts: bool = True
) -> Tensor:
    """(B, n, V) raw logits -> (B, n) the smallest logit that is kept.

    Per row: k (V: off), p (inf: off), min-p (0: off). `sorts`: any row uses top-k or top-p; the oracle is much faster
    where no row does.
    """
    if not runs_kernels(logits):
        return naive.smallest(logits, temperature, top_k, top_p, min_p, sorts)
    operator = smallest_operator if torch.compiler.is_compiling() else _smallest
    found: Tensor = operator(logits, temperature, top_k, top_p, min_p)
    return found


def _smallest(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    from redrafter.kernels.verify.floors import triton

    rows = (temperature.float(), top_k, top_p.float(), min_p.float().log())
    return triton.smallest(logits, *(values.contiguous() for values in rows))


smallest_operator = torch.library.custom_op("redrafter::verify_smallest", _smallest, mutates_args=())


@smallest_operator.register_fake
def _(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.float32)
