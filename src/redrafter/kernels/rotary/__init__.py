"""What stands between a layer's first product and its attention: head norms, rotation, the KV cache. See naive.py."""

from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.rotary import naive
from redrafter.kernels.rotary.naive import HeadNorms, Heads

__all__ = ["HeadNorms", "Heads", "rotate"]


def rotate(
    parts: Tensor, cos: Tensor, sin: Tensor, heads: Heads, keys: Tensor, values: Tensor, lines: Tensor
) -> Tensor:
    """Partial sums (S, T, ...) of queries, keys and values, cos and sin (T, R) -> rotated queries (T, H, D).

    Keys (rotated) and values are written to the KV cache (P, K, S, D), where the lines (T, COLUMNS) say.
    """
    if runs_triton(parts.device):
        from redrafter.kernels.rotary import triton

        return triton.rotate(parts, cos, sin, heads, keys, values, lines)
    return naive.rotate(parts, cos, sin, heads, keys, values, lines)
