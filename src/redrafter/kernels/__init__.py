"""Operators worth writing by hand, a folder each: the naive one is the oracle, the fast one stands beside it."""

import importlib.util

import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels can be used for tensors there."""
    return device.type == "cuda" and _HAS_TRITON
