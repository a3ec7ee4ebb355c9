"""Moves small tables from the host to a device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def put(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, an array or a tensor on the device. From pinned memory: the host does not wait for a GPU's work.

    >>> put([[1, 2], [3, 4]], "cpu").tolist()
    [[1, 2], [3, 4]]
    """
    on_host = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever torch's default device is
    return (on_host.pin_memory() if torch.device(device).type == "cuda" else on_host).to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(n, P) tokens of rows, filled on the right with token 0, which is never seen."""
    width = max(len(row) for row in rows)
    return put([[*row, *[0] * (width - len(row))] for row in rows], device)
