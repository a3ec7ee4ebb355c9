"""Verification on a CPU in numpy: for the few nodes of a step, torch would wake threads for every operation."""

import numpy as np
import torch
from torch import Tensor


def seeded(logits: Tensor, depths: Tensor, temperature: Tensor, noise: Tensor, floor: Tensor | None) -> Tensor:
    """As `naive.seeded`, in fp32."""
    found, scores = np.empty(logits.shape[:2], np.int64), np.empty(logits.shape[2], np.float32)
    given, drawn = logits.detach().numpy(), noise.numpy()
    least = None if floor is None else floor.numpy()
    for row, by in enumerate(temperature.numpy()):
        for node, depth in enumerate(depths[row].numpy()):
            np.copyto(scores, given[row, node])
            if least is not None:
                scores[scores < least[row, node]] = -np.inf
            if by > 0:
                scores /= by.astype(np.float32)
                scores += drawn[row, depth]
            found[row, node] = scores.argmax()
    return torch.from_numpy(found)
