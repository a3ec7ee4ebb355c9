"""Matrices before they are packed for the kernels: quantised in groups, or floats."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Quantised:
    """A quantised matrix (rows, columns): a weight is `scale * (value - zero) + minimum`.

    One scale, and at most one minimum, belongs to a group of values in a row.
    """

    bits: Literal[4, 8]
    values: Array  # (rows, columns), uint8 below 16 for 4 bits, int8 for 8 bits
    scales: Array  # (rows, columns / group), fp16 or fp32
    minimums: Array | None = None  # the same shape and type as the scales
    zero: int = 0
    """The value that stands for a weight of 0, before the minimum is added."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def group(self) -> int:
        return int(self.values.shape[1] // self.scales.shape[1])

    def select(self, rows: Array) -> Self:
        """The matrix of these rows, in this order."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], minimums=minimums)

    def dequantise(self) -> Array:
        """The weights in fp32."""
        count, columns = self.shape
        grouped = (self.values.astype(np.float32) - np.float32(self.zero)).reshape(count, -1, self.group)
        weights = self.scales.astype(np.float32)[:, :, None] * grouped
        if self.minimums is not None:
            weights += self.minimums.astype(np.float32)[:, :, None]
        return weights.reshape(count, columns)


@dataclass(frozen=True)
class Floats:
    """A matrix or vector of floats: fp32, fp16, or bf16 as the uint16 that hold its bits."""

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def select(self, rows: Array) -> Self:
        """The matrix of these rows, in this order."""
        return replace(self, values=self.values[rows])

    def dequantise(self) -> Array:
        """The weights in fp32."""
        if self.values.dtype == np.uint16:
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


Matrix = Quantised | Floats


def quantise(weights: Array, bits: Literal[4, 8], group: int = 32) -> Quantised:
    """Round fp32 weights to 8 bits with a scale a group, or to 4 bits with a scale and a minimum a group.

    >>> made = quantise(np.linspace(-1, 1, 64, dtype=np.float32)[None], 8)
    >>> float(np.abs(made.dequantise() - np.linspace(-1, 1, 64)).max()) < 0.5 / 127 + 1e-3
    True
    """
    rows, columns = weights.shape
    grouped = weights.reshape(rows, columns // group, group)
    if bits == 8:
        scales = (np.abs(grouped).max(2) / 127).astype(np.float16)
        values = _rounded(grouped, scales).clip(-127, 127).astype(np.int8)
        return Quantised(8, values.reshape(rows, columns), scales)
    least = grouped.min(2).astype(np.float16)
    scales = ((grouped.max(2) - least.astype(np.float32)) / 15).astype(np.float16)
    values = _rounded(grouped - least.astype(np.float32)[:, :, None], scales).clip(0, 15).astype(np.uint8)
    return Quantised(4, values.reshape(rows, columns), scales, least)


def _rounded(values: Array, scales: Array) -> Array:
    by = scales.astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(by == 0, np.float32(0), 1 / by)
    made: Array = values * inverse[:, :, None]
    np.rint(made, out=made)
    return made
