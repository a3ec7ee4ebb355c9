"""CUDA graphs on a CPU: the operations of an action, repeated later on the very same tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Like a CUDA graph, a tape knows addresses and operations alone: no Python runs again, no value can be read.

    `reads`: values can be read all the same, for a tape that is looked at and never replayed.
    """

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self.reads:
            raise RuntimeError("a graph cannot wait for a value")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(actions: Sequence[Callable[[], None]]) -> list[Tape]:
    """As `runtime.graph.recorded`."""
    for action in actions:
        action()
    tapes = []
    for action in actions:
        with Tape() as tape:
            action()
        tapes.append(tape)
    return tapes
