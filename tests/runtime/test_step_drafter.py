"""What a step keeps of the hidden states."""

from dataclasses import fields

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from redrafter.core.step import Rows
from redrafter.drafters import NoDrafter
from redrafter.runtime.step_drafter import StepDrafter

SLOTS = 1237


def remember(lengths, history, hidden):
    rows = Rows(**({f.name: None for f in fields(Rows)} | {"lengths": lengths, "done": lengths < 0}))
    StepDrafter(NoDrafter(), rows, history, follows=None, guesses=False).remember(hidden)
    return lengths + 1


def scattered(lengths, history, hidden):
    at = lengths[:, None] + torch.arange(hidden.shape[1])
    history.scatter_(1, at[..., None].expand_as(hidden), hidden)
    return lengths + 1


def buffers_of_that_size(function):
    """How many buffers as large as the history the compiled function allocates."""
    lengths, history, hidden = torch.tensor([3, 700]), torch.zeros(2, SLOTS, 8).half(), torch.randn(2, 6, 8).half()
    torch._dynamo.reset()
    _, code = run_and_get_code(torch.compile(function), lengths, history, hidden)
    assert torch.equal(history[0, 3:9], hidden[0])
    assert torch.equal(history[1, 700:706], hidden[1])
    assert int(history.any(2).sum()) == 12, "nothing else is written"
    return "\n".join(code).count(f"empty_strided_cpu((2, {SLOTS}, 8)")


@pytest.mark.slow
def test_remembering_compiles_to_a_write_in_place():
    """The history of a long text is large: copying it twice would take 0.2 ms of a step on an H200."""
    assert buffers_of_that_size(remember) == 0
    assert buffers_of_that_size(scattered) == 1, "twin: `scatter_` copies"
