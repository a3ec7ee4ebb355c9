"""The dry run before a recording: it asks for every kernel that the step launches, runs none, and changes nothing.

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
from redrafter.runtime import executor as executor_module
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
    monkeypatch.setattr(executor_module, "compile_kernels", dry)
    monkeypatch.setitem(drafter_layers._TRUSTED, (torch.device("cpu"), torch.float32), True)
    return seen


@torch.no_grad()
def test_the_dry_run_asks_for_every_kernel_and_changes_nothing(launched):
    target = load_target(make_model("llama", torch.float32))
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE, runtime="graphs")
    engine.recorded = True
    batch = engine._batch([Request(prompt=PROMPTS[0], max_new_tokens=4, seed=1)], 1, engine.drafter)
    batch.read(batch.open(Request(prompt=PROMPTS[0], max_new_tokens=4, seed=1)), 512)
    run = batch.executor
    sampling = Sampling.of([SamplingParams(temperature=1.0, top_p=0.9)], target.vocab_size, target.device)
    rows, drafter, cache = run._parts(0, 1, True, SHAPE, sampling, trims=False)
    kept = [*tensors_of(rows), *batch.state.cache.tensors(), batch.state.history]
    before = [x.clone() for x in kept]
    with kernels.force("triton"):
        run._compile_kernels(rows, cache, sampling, run.rule(SHAPE), drafter)
        # The mask is packed for real: layers that are not fused use it as indices. Its kernel compiles in a moment.
        assert launched[False] <= {"_pack_mask"}
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))

        with executor_module.serving(run.verifier, cache):
            executor_module.run_step(rows, cache, sampling, run.rule(SHAPE), drafter, run.verifier)
        assert {"_chunk", "_choose", "_pack", "_node_choices", "_floor", "_cell", "_commit"} <= launched[False]
        assert launched[True] == launched[False] - {"_pack_mask"}
