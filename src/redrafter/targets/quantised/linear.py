"""A linear layer that rounds what it receives, as schemes for 8-bit weights and activations do."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

FP8_MOST = 448.0
"""The largest number of the type float8_e4m3fn."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How a layer's input becomes 8 bits: a value is divided by a scale, rounded, and multiplied by the scale."""

    to: Literal["fp8", "int8"]
    group: int | None = None
    """Neighbouring values that share a scale; None: all values of a token."""
    static: bool = False
    """Whether the checkpoint has one scale for all tokens. Otherwise a token's largest values decide."""

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """(..., n) -> the same shape and type. A token's result depends on that token alone.

        >>> Rounding(to="int8")(torch.tensor([[1.0, 127.5, -127.5, 0.4]])).tolist()
        [[1.0, 127.0, -128.0, 0.0]]
        """
        wide = x if x.dtype == torch.float64 else x.float()
        wide = torch.unflatten(wide, -1, (-1, self.group or x.shape[-1]))
        least, most = (-FP8_MOST, FP8_MOST) if self.to == "fp8" else (-128.0, 127.0)
        if scale is None:
            scale = wide.abs().amax(-1, keepdim=True) / ((most - least) / 2)
            scale = torch.where(scale == 0, 1.0, scale)  # of values that are all zeros
        scale = scale.to(wide.dtype)
        values = (wide / scale).clamp(least, most)
        values = values.to(torch.float8_e4m3fn).to(wide.dtype) if self.to == "fp8" else values.round()
        return (values * scale).flatten(-2).to(x.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer whose input is rounded. It takes over the weight and bias of another one."""

    input_scale: Tensor | None

    def __init__(self, linear: nn.Linear, rounding: Rounding, input_scale: Tensor | None = None) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias, self.rounding = linear.weight, linear.bias, rounding
        self.register_buffer("input_scale", input_scale, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(self.rounding(input, self.input_scale), self.weight, self.bias)


def rounds(model: nn.Module) -> bool:
    """Whether any layer rounds what it receives: passes then differ by that rounding, not by that of their dtype."""
    return any(isinstance(module, RoundedLinear) for module in model.modules())
