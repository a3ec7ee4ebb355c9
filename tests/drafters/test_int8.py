"""int8 weights of drafters on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redrafter.drafters import int8
from redrafter.kernels.cpu import ops
from redrafter.kernels.cpu.matrices import quantise

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ compiler here")


@torch.no_grad()
def test_linear_layers_multiply_by_rounded_weights():
    layer = nn.Linear(96, 50)
    rounded = torch.from_numpy(quantise(layer.weight.numpy(), 8).dequantise())
    own = layer.weight.clone()
    int8.replace_linears(nn.Sequential(layer))
    for shape in ((1, 96), (16, 96), (2, 5, 96)):
        x = torch.randn(shape)
        made = layer(x)
        assert torch.allclose(made, F.linear(x, rounded, layer.bias), atol=1e-5)
        assert not torch.allclose(made, F.linear(x, own, layer.bias), atol=1e-5), "twin: unrounded weights"
        alone = torch.stack([layer(row[None])[0] for row in x.view(-1, 96)])
        assert torch.equal(made.view(-1, 50), alone)


def test_other_inputs_and_widths_use_the_layers_own_weights():
    layer, narrow = nn.Linear(96, 50), nn.Linear(40, 3)
    net = nn.ModuleList([layer, narrow])
    int8.replace_linears(net)
    x = torch.randn(17, 96)  # many rows
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert torch.equal(narrow(x[:2, :40]), F.linear(x[:2, :40], narrow.weight, narrow.bias))
    layer(x[:1]).sum().backward()
    assert layer.weight.grad is not None
