"""A fingerprint of a model's weights as they are in memory: one pass over them, a tenth of a second for 7B on a GPU."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from redrafter.core.noise import GOLDEN, mix

CHUNK = 1 << 22
"""Words of 8 bytes that are hashed at once: bounds the memory."""


@torch.no_grad()
def fingerprint(model: Any, device: torch.device) -> str | None:
    """A digest of names, shapes, dtypes and bytes of all parameters and buffers; None if any is elsewhere."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(x.device != device for _, x in tensors):
        return None
    hashes = torch.stack([_hash(x) for _, x in tensors]).tolist()  # the only wait for the GPU
    each = [(name, list(x.shape), str(x.dtype), h) for (name, x), h in zip(tensors, hashes, strict=True)]
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()


def _hash(x: Tensor) -> Tensor:
    """() int64: the sum of the scrambled words, each of which is first combined with its scrambled index."""
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-len(data) % 8)])
    total = torch.zeros((), dtype=torch.long, device=x.device)
    whole = data.view(torch.long)
    for start in range(0, len(whole), CHUNK):
        words = whole[start : start + CHUNK]
        index = torch.arange(start, start + len(words), device=x.device)
        total += mix(words ^ mix(index * GOLDEN)).sum()
    return total
