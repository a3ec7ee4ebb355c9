"""Linear layers that read the same input, run as one product: fewer and larger kernels.

The weights of such layers are stacked in one tensor, and each layer's parameters become views of it. The model's
parameters keep their values and identity, but not their storage; `StackedLinear.separate` gives it back to them.
Inside `replaced`, slices of the one product take the place of the layers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that read the same input."""


class StackedLinear(nn.Module):
    """Several linear layers as one product. The product is computed for its first slice and freed after its last."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.moved = [*_to_move(weights), *_to_move(biases)]
        self.weight = nn.Parameter(stacked(weights), requires_grad=False)
        self.bias = nn.Parameter(stacked(biases), requires_grad=False) if biases else None
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.output is None or self.input is not x:
            self.input, self.output = x, F.linear(x, self.weight, self.bias)
        return self.output

    def separate(self) -> None:
        """Give the layers' parameters storage of their own again."""
        own = {t.untyped_storage().data_ptr() for t in (self.weight, self.bias) if t is not None}
        for parameter in self.moved:
            if parameter.untyped_storage().data_ptr() in own:  # a user may have moved the model in the meantime
                parameter.data = parameter.data.clone()
        self.moved = []


class LinearSlice(nn.Module):
    """One layer's columns of a stacked product."""

    def __init__(self, stack: StackedLinear, start: int, stop: int) -> None:
        super().__init__()
        self.stack, self.start, self.stop = stack, start, stop

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.stack(x)
        if self.stop == whole.shape[-1]:
            self.stack.input = self.stack.output = None
        return whole[..., self.start : self.stop]


def _stacked_already(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters (rows, ...) lie one behind the other in one storage."""
    first, rows = parameters[0], [len(p) for p in parameters]
    places = [first.data_ptr() + sum(rows[:i]) * first[0].numel() * first.element_size() for i in range(len(rows))]
    whole = first.untyped_storage()
    return all(
        p.is_contiguous() and p.untyped_storage().data_ptr() == whole.data_ptr() and p.data_ptr() == place
        for p, place in zip(parameters, places, strict=True)
    )


def _to_move(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [] if not parameters or _stacked_already(parameters) else list(parameters)


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters (rows, ...) as one tensor. Parameters that are not stacked yet become views of a new one."""
    first, rows = parameters[0], [len(p) for p in parameters]
    if _stacked_already(parameters):
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())
    made = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, torch.split(made, rows), strict=True):
        p.data = part
    return made


class Replacement(NamedTuple):
    """A slice that can take the place of a child module."""

    parent: nn.Module
    name: str
    layer: nn.Module
    slice: LinearSlice


@torch.no_grad()
def stack_linears(model: nn.Module) -> list[Replacement]:
    """Stack all layers of a model that can be stacked; return what can take their place."""
    found: list[Replacement] = []
    for parent in list(model.modules()):
        for names in SAME_INPUT:
            layers = stackable([parent._modules.get(name) for name in names])
            if layers is None:
                continue
            stack, start = StackedLinear(layers), 0
            for name, layer in zip(names, layers, strict=True):
                part = LinearSlice(stack, start, start + layer.out_features)
                found.append(Replacement(parent, name, layer, part))
                start += layer.out_features
    return found


def stackable(layers: Sequence[nn.Module | None]) -> list[nn.Linear] | None:
    """The layers if all are plain linear layers; None if one is quantised, adapted, hooked or on another device."""
    plain, kinds = [], set()
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        plain.append(layer)
        kinds.add((layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None))
    return plain if len(kinds) == 1 else None


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Put slices in the place of the layers, and the layers back at the end."""
    for r in replacements:
        r.parent._modules[r.name] = r.slice
    try:
        yield
    finally:
        for r in replacements:
            r.parent._modules[r.name] = r.layer
