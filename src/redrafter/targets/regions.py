"""A model's layers fused or compiled by themselves: they are alike, so what is compiled for one serves them all.

A model compiled whole takes a minute for each kind of pass, its layer a few seconds; what is lost is the fusion across
layers, a kernel in twenty.
"""

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.targets.fused import HOOKS, fused
from redrafter.targets.joined import Stand
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

Forward = Callable[..., Any]

ONE_TOKEN: dict[str, Any] = {"coordinate_descent_tuning": True}
"""Products of one token become reductions fused with what is around them. Passes of many tokens are compiled for any
number of them; tuned for the first that comes, they were slow for the others."""


def compiled(forward: Forward, whole: Forward | None, choice: "Choice") -> Forward:
    """A module's forward, compiled or, where there is a fused pass, that; one token by itself has its own."""
    one = torch.compile(forward, dynamic=True, fullgraph=True, options=ONE_TOKEN)
    many = whole or torch.compile(forward, dynamic=True, fullgraph=True)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[:2].numel() > 1:
            return many(x, *args, **kwargs)
        return choice((whole, one), x, *args, **kwargs) if whole else one(x, *args, **kwargs)

    return run


class Choice:
    """Which of several passes is the fastest, asked once for all of a model's layers: they are alike."""

    def __init__(self) -> None:
        self.made: int | None = None

    def __call__(self, ways: Sequence[Forward], *args: Any, **kwargs: Any) -> Any:
        if self.made is None:
            calls = [functools.partial(way, *args, **kwargs) for way in ways]
            took = [recorded_ms(call) for call in calls] if args[0].is_cuda else [0.0]
            self.made = took.index(min(took))
            log.info("one token's pass of a layer, fused and compiled: %s ms", took)
        return ways[self.made](*args, **kwargs)


def recorded_ms(call: Callable[[], Any], runs: int = 5) -> float:
    """How long the GPU takes for it, without the host."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    for _ in range(runs):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / runs


class Regions:
    """What stands in for the forwards of a model's layers, and of what is beside them (embedding, rotation, norm)."""

    def __init__(self, target: Target, stands: list[Stand], compiles: bool) -> None:
        self.passes: list[tuple[nn.Module, Forward]] = []
        choice = Choice()
        for parent in target.model.modules():
            layers = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == target.layer_count]
            if layers:
                whole = fused(target, layers[0], stands)
                beside = [m for m in parent.children() if m is not layers[0]]
                for module in [*layers[0], *beside]:
                    if "forward" not in vars(module):  # others' changes stay theirs
                        if compiles:
                            self.passes.append((module, compiled(module.forward, whole.get(module), choice)))
                        elif module in whole:
                            self.passes.append((module, whole[module]))
                break

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """These passes stand in for the modules' own for a while."""
        hooked = []
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
