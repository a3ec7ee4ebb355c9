"""The dry run before a recording: it asks for every kernel that the step and its pass launch, runs none, and changes
nothing.

In Triton's interpreter, where a kernel that is only to be compiled does nothing.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from redrafter import Engine, Shape, kernels
from redrafter.config import SamplingParams
from redrafter.core.sampling import Sampling
from redrafter.engine.request import Request
from redrafter.kernels import drafter_layers
from redrafter.runtime import flat_pass, recorded, recorded_step
from redrafter.runtime.recorded_step import RecordedStep
from redrafter.runtime.state import tensors_of
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter"),
]
SHAPE = Shape(width=2, length=2, nodes=3)


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched, or were only to be compiled, so far."""
    seen = {True: set(), False: set()}
    whole = InterpretedFunction.run

    def run(self, *args, warmup, **kwargs):
        seen[warmup].add(self.fn.__name__)
        return whole(self, *args, warmup=warmup, **kwargs)

    def dry(run, device):
        token = kernels._compiles_only.set(True)
        try:
            run()
        finally:
            kernels._compiles_only.reset(token)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    for module in (recorded, flat_pass):
        monkeypatch.setattr(module, "compile_kernels", dry)
    monkeypatch.setitem(drafter_layers._TRUSTED, (torch.device("cpu"), torch.float32), True)
    return seen


@torch.no_grad()
def test_the_dry_run_asks_for_every_kernel_and_changes_nothing(launched, monkeypatch):
    target = load_target(make_model("llama", torch.float32))
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE, runtime="graphs")
    engine.recorded = True
    asked = Request(prompt=PROMPTS[0], max_new_tokens=4, seed=1)
    batch = engine._batch([asked], 1, engine.drafter)
    batch.read_all([batch.open(asked)])
    batch.state.allocate(engine.drafter)
    sampling = Sampling.of([SamplingParams(temperature=1.0, top_p=0.9)], target.vocab_size, target.device)
    tokens = batch.state.history[:, :-1]  # the last slot is no token's
    steps, kept = batch.steps, [*tensors_of(batch.state.rows), *batch.state.cache.tensors(), tokens]
    before = [x.clone() for x in kept]

    def record() -> None:
        steps._recorded(
            RecordedStep(steps._parts(steps.kind(1, SHAPE, True, sampling, False), sampling), lambda f: f), None
        )

    with kernels.force("triton"):
        with monkeypatch.context() as patch:
            for module in (recorded_step, flat_pass):
                patch.setattr(module, "unrecorded", lambda actions: [None for _ in actions])
            record()
        assert not launched[False]
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))

        asked_for = launched[True].copy()
        steps.passes.graphs.clear()
        record()
        assert {"_choose", "_pack", "_flatten", "_node_choices", "_floor", "_cell", "_commit"} <= launched[False]
        assert asked_for == launched[False]
