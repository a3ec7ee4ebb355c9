"""A model's layers, fused or else compiled one by one. Layers are alike, so code compiled for one runs all of them.

Compiling a whole model takes a minute for each kind of pass, compiling a layer a few seconds. The price is the fusion
across layers, which would save one kernel in twenty.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.targets.cuda.fused_layer import FusedLayer, defer_sums, fuse_layers
from redrafter.targets.cuda.fused_qkv import Replacement
from redrafter.targets.cuda.layer_parts import TRANSFORMERS_HOOKS, CannotFuse, norm_of
from redrafter.targets.cuda.model_ends import LONGEST, Head, LastNorm, RotaryTable
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

Forward = Callable[..., Any]

ONE_TOKEN: dict[str, Any] = {"coordinate_descent_tuning": True}
"""Options for passes of one token: products become reductions that are fused with their neighbours. Passes of many
tokens are compiled for any number of tokens; tuned for the first number they meet, they were slow for others."""

TOGETHER: dict[str, Any] = {"combo_kernels": True}
"""Options for the code around the layers: small operations that do not depend on each other become one kernel."""


def start_workers() -> None:
    """Start torch.compile's worker processes now: they take seconds, and until then the compiler has one thread."""
    try:
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
    except Exception as error:  # another version of torch: its compiler starts them itself, later
        log.debug("the compiler's workers are not started early: %s", error)


def compile_forward(forward: Forward) -> Forward:
    """A module's forward, compiled once for a single token and once for any number of tokens."""
    one = torch.compile(forward, dynamic=True, fullgraph=True, options=ONE_TOKEN)
    many = torch.compile(forward, dynamic=True, fullgraph=True)

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (one if x.shape[:2].numel() == 1 else many)(x, *args, **kwargs)

    return run


class LayerForwards:
    """Faster forwards for a model's layers and the modules beside them (embedding, rotary embedding, norm, head)."""

    def __init__(self, target: Target, replacements: list[Replacement], compiles: bool) -> None:
        self.forwards: list[tuple[nn.Module, Forward]] = []
        self.fused = False
        for parent in target.model.get_decoder().modules():  # a part that reads images may have as many layers
            layers = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == target.layer_count]
            if layers:
                fused = fuse_layers(target, layers[0], replacements)
                beside = [m for m in parent.children() if m is not layers[0]]
                self.fused = len(fused) == target.layer_count
                ends = _ends(target, beside) if self.fused else {}
                for module in [*layers[0], *beside, *(m for m in ends if m not in beside)]:
                    if "forward" in vars(module):  # a user's own change stays in place
                        continue
                    if module in fused:
                        self.forwards.append((module, fused[module]))
                    elif module in ends:
                        self.forwards.append((module, ends[module]))
                    elif compiles and not self.fused:
                        self.forwards.append((module, compile_forward(module.forward)))
                break

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put these forwards in the place of the modules' own, and the modules' own back at the end."""
        hooked = []
        defer_sums([(module, forward) for module, forward in self.forwards if isinstance(forward, FusedLayer)])
        for module, forward in self.forwards:
            module.forward = forward
            inner = (m for m in module.modules() if m is not module and m._forward_hooks)
            hooked += [(m, m._forward_hooks) for m in inner]
        for module, hooks in hooked:
            kept = ((i, h) for i, h in hooks.items() if h.__module__ != TRANSFORMERS_HOOKS)
            module._forward_hooks = OrderedDict(kept)
        # All layers share one compiled code; a layer's index becomes a symbolic integer.
        many = torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True)
        try:
            with many:
                yield
        finally:
            for module, hooks in hooked:
                module._forward_hooks = hooks
            for module, _ in self.forwards:
                del module.forward


@torch.no_grad()
def _ends(target: Target, beside: list[nn.Module]) -> dict[nn.Module, Forward]:
    """Forwards for the modules before and behind fused layers, as far as they are known."""
    found: dict[nn.Module, Forward] = {}
    for module in beside:
        if hasattr(module, "inv_freq") or type(module).__name__.endswith("RotaryEmbedding"):
            if target.max_positions <= LONGEST and not _follows_length(target.config):
                found[module] = RotaryTable(target, module.forward)
        else:
            try:
                found[module] = LastNorm(norm_of(module))
            except CannotFuse:
                continue
    if type(target.output_embedding) is nn.Linear and not target.output_embedding._forward_hooks:
        found[target.output_embedding] = Head(target.output_embedding)
    return found


def _follows_length(config: Any) -> bool:
    """Whether the rotary angles of a position depend on the length of the text."""
    scaling = str([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    return "longrope" in scaling or "dynamic" in scaling
