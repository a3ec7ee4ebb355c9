"""A model's layers fused, or else compiled by themselves: they are alike, so what is compiled for one serves them all.

A model compiled whole takes a minute for each kind of pass, its layer a few seconds; what is lost is the fusion across
layers, a kernel in twenty.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.targets.cuda.fused_layer import HOOKS, FusedLayer, fused, hand_over
from redrafter.targets.cuda.fused_qkv import Stand
from redrafter.targets.target import Target

Forward = Callable[..., Any]

ONE_TOKEN: dict[str, Any] = {"coordinate_descent_tuning": True}
"""Products of one token become reductions fused with what is around them. Passes of many tokens are compiled for any
number of them; tuned for the first that comes, they were slow for the others."""

TOGETHER: dict[str, Any] = {"combo_kernels": True}
"""For what is around a model's layers: small things that do not wait for each other become one kernel."""


def compiled(forward: Forward) -> Forward:
    """A module's forward, compiled; one token by itself is compiled for itself."""
    one = torch.compile(forward, dynamic=True, fullgraph=True, options=ONE_TOKEN)
    many = torch.compile(forward, dynamic=True, fullgraph=True)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (one if x.shape[:2].numel() == 1 else many)(x, *args, **kwargs)

    return run


class Regions:
    """What stands in for the forwards of a model's layers, and of what is beside them (embedding, rotation, norm)."""

    def __init__(self, target: Target, stands: list[Stand], compiles: bool) -> None:
        self.passes: list[tuple[nn.Module, Forward]] = []
        for parent in target.model.modules():
            layers = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == target.layer_count]
            if layers:
                whole = fused(target, layers[0], stands)
                beside = [m for m in parent.children() if m is not layers[0]]
                for module in [*layers[0], *beside]:
                    if "forward" in vars(module):  # others' changes stay theirs
                        continue
                    if module in whole:
                        self.passes.append((module, whole[module]))
                    elif compiles:
                        self.passes.append((module, compiled(module.forward)))
                break

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """These passes stand in for the modules' own for a while."""
        hooked = []
        hand_over([(module, forward) for module, forward in self.passes if isinstance(forward, FusedLayer)])
        for module, forward in self.passes:
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
            for module, _ in self.passes:
                del module.forward
