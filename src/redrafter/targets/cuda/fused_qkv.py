"""Products of one input as one product: fewer kernels, and longer ones, which read memory better.

The weights come to lie one behind the other in memory, and each layer keeps its part of them as its own, so the model
is as it was. While a tree is served, parts of the joint product stand in for the layers.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

READ_ALIKE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that, under these names and one roof, read the same input."""


class Joint(nn.Module):
    """All of the product, made when its first part is asked for and forgotten with its last."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(stacked([layer.weight for layer in layers]), requires_grad=False)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(stacked(biases), requires_grad=False) if biases else None
        self.read: Tensor | None = None
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None or self.read is not x:
            self.read, self.made = x, F.linear(x, self.weight, self.bias)
        return self.made


class Part(nn.Module):
    """One layer's share of the joint product."""

    def __init__(self, joint: Joint, start: int, stop: int) -> None:
        super().__init__()
        self.joint, self.start, self.stop = joint, start, stop

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.joint(x)
        if self.stop == made.shape[-1]:
            self.joint.read = self.joint.made = None
        return made[..., self.start : self.stop]


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters (rows, ...) as one, as they lie or moved there."""
    first, rows = parameters[0], [len(p) for p in parameters]
    places = [first.data_ptr() + sum(rows[:i]) * first[0].numel() * first.element_size() for i in range(len(rows))]
    whole = first.untyped_storage()
    if all(
        p.is_contiguous() and p.untyped_storage().data_ptr() == whole.data_ptr() and p.data_ptr() == place
        for p, place in zip(parameters, places, strict=True)
    ):
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())
    made = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, torch.split(made, rows), strict=True):
        p.data = part
    return made


Stand = tuple[nn.Module, str, nn.Module, Part]
"""Whose child, its name, the child, and what stands in for it."""


@torch.no_grad()
def stands(model: nn.Module) -> list[Stand]:
    """Parts for all layers of a model that can be joined."""
    found: list[Stand] = []
    for parent in list(model.modules()):
        for names in READ_ALIKE:
            layers = joinable([parent._modules.get(name) for name in names])
            if layers is None:
                continue
            joint, start = Joint(layers), 0
            for name, layer in zip(names, layers, strict=True):
                found.append((parent, name, layer, Part(joint, start, start + layer.out_features)))
                start += layer.out_features
    return found


def joinable(layers: Sequence[nn.Module | None]) -> list[nn.Linear] | None:
    """Plain linear layers only: what is quantised, adapted, hooked or spread over devices stays as it is."""
    plain, kinds = [], set()
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        plain.append(layer)
        kinds.add((layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None))
    return plain if len(kinds) == 1 else None


@contextlib.contextmanager
def standing(every: Sequence[Stand]) -> Iterator[None]:
    """The parts stand in for the layers for a while."""
    for parent, name, _, part in every:
        parent._modules[name] = part
    try:
        yield
    finally:
        for parent, name, layer, _ in every:
            parent._modules[name] = layer
