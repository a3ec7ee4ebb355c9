"""What filters keep of logits, as one number a row, on a GPU; the sorted row of core/sampling.py is the oracle."""

from typing import Any

import torch
from torch import Tensor


def _smallest(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """(B, n, V) raw logits -> (B, n) the smallest that is kept; per row k (V: off), p (inf: off), min-p's logarithm."""
    from redrafter.kernels.verify.floors import triton

    rows = (temperature.float(), top_k, top_p.float(), log_min_p.float())
    return triton.smallest(logits, *(values.contiguous() for values in rows))


smallest_operator = torch.library.custom_op("redrafter::verify_smallest", _smallest, mutates_args=())


@smallest_operator.register_fake
def _(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.float32)


def smallest(*args: Any) -> Tensor:
    """As an operator where a step is being compiled, else at once."""
    found: Tensor = (smallest_operator if torch.compiler.is_compiling() else _smallest)(*args)
    return found
