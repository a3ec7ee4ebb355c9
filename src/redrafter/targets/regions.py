"""A model's layers compiled by themselves: they are alike, so what is compiled for one serves them all.

A model compiled whole takes a minute for each kind of pass, its layer a few seconds; what is lost is the fusion across
layers, a kernel in twenty.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = "transformers.utils.output_capturing"
"""Who hangs hooks into attention layers, for outputs that nobody asks for here; compilers do not follow them."""


ONE_TOKEN: dict[str, Any] = {"coordinate_descent_tuning": True}
"""Products of one token become reductions fused with what is around them, which beat a library's on a GPU. Passes of
many tokens are compiled for any number of them; tuned for the first that comes, they were slow for the others."""


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward, compiled; one token by itself is compiled for itself."""
    one = torch.compile(forward, dynamic=True, fullgraph=True, options=ONE_TOKEN)
    many = torch.compile(forward, dynamic=True, fullgraph=True)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (one if x.shape[:2].numel() == 1 else many)(x, *args, **kwargs)

    return run


class Regions:
    """The compiled forwards of a model's layers, and of what stands beside them (embedding, rotation, norm)."""

    def __init__(self, model: nn.Module, layer_count: int) -> None:
        self.compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        for parent in model.modules():
            layers = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == layer_count]
            if layers:
                beside = [m for m in parent.children() if m is not layers[0]]
                for module in [*layers[0], *beside]:
                    if "forward" not in vars(module):  # others' changes stay theirs
                        self.compiled.append((module, compiled(module.forward)))
                break

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """The compiled forwards stand in for the modules' own for a while."""
        hooked = []
        for module, forward in self.compiled:
            module.forward = forward
            inner = (m for m in module.modules() if m is not module and m._forward_hooks)
            hooked += [(m, m._forward_hooks) for m in inner]
        for module, hooks in hooked:
            kept = ((i, h) for i, h in hooks.items() if h.__module__ != HOOKS)
            module._forward_hooks = OrderedDict(kept)
        # One code for all layers; a layer's number is one more number that changes.
        many = torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True)
        try:
            with many:
                yield
        finally:
            for module, hooks in hooked:
                module._forward_hooks = hooks
            for module, _ in self.compiled:
                del module.forward
