"""One side of benchmarks/versions.py: runs the redrafter on its PYTHONPATH and answers commands with measured times.

The process reads its settings as one line of JSON, then commands (`run PART`), one a line, and answers
each with one line of JSON. Only this file knows the names of the older version (before one running batch).
"""

import json
import sys
import threading
import time
from typing import Any

import torch

import redrafter
from redrafter import Engine, Shape
from redrafter.config import SamplingParams
from redrafter.drafters import RecurrentDrafter
from redrafter.engine.request import Request
from redrafter.runtime import bulk
from redrafter.serve.job import Job
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.targets import load_target

START: Any = None
"""How the older version describes a row; None in the newer one."""
try:
    from redrafter.drafters import RecurrentConfig, RecurrentNet
    from redrafter.planning.steps import FixedSteps
    from redrafter.runtime.batch import Batch
except ImportError:  # the older version
    from redrafter.nets.recurrent import RecurrentNet  # type: ignore[import-not-found, no-redef]
    from redrafter.runtime.pool import Pool as Batch  # type: ignore[import-not-found, no-redef]
    from redrafter.serve.costs import Costs  # type: ignore[import-not-found]

    def FixedSteps(shape: Any) -> Any:  # type: ignore[no-redef]  # noqa: N802
        return Costs(None, shape)

    from redrafter.runtime.eager import Start as OldStart  # type: ignore[attr-defined]

    START = OldStart

    from redrafter.config import RecurrentConfig  # type: ignore[attr-defined, no-redef]


def write_requests(target: Any, requests: list[Request], rows: int) -> None:
    """Bulk writing in either version."""
    write: Any = bulk.write_texts
    if START is None:
        write(target, requests, rows=rows)
    else:
        starts = [START(r.prompt, r.seed, r.max_new_tokens, r.eos) for r in requests]
        write(target, starts, [r.sampling.temperature for r in requests], rows=rows)


class Worker:
    """The parts to time, over one engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.shape = Shape.of(settings["shape"])
        self.device = settings["device"]
        if settings["llama"] is None:  # the default model and its drafter
            self.engine = redrafter.load(shape=self.shape)
        else:
            self.engine = self._random()
        self.served: Any = None
        size = self.engine.target.vocab_size
        random = torch.Generator().manual_seed(1)
        length = settings["prompt"]
        self.prompts = [torch.randint(size, (length,), generator=random).tolist() for _ in range(64)]

    def _random(self) -> Engine:
        """A Llama of a given shape with random weights, the same in both versions, and a drafter for it."""
        from transformers import LlamaConfig, LlamaForCausalLM

        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(LlamaConfig(**self.settings["llama"])).to(dtype).eval()
        target = load_target(model)
        torch.manual_seed(0)
        middle = target.layer_count // 2
        config = RecurrentConfig(
            vocab_size=target.vocab_size,
            context_size=3 * target.hidden_size,
            embedding_size=target.hidden_size,
            layers=(min(2, middle), middle, -1),
            cell="gated",
            first_state="context",
            normed=True,
            memory_heads=4,
            **self.settings["drafter"],
        )
        return Engine(target, RecurrentDrafter(RecurrentNet(config).to(self.device, dtype), target), shape=self.shape)

    def run(self, part: str) -> dict[str, float]:
        began = time.perf_counter()
        if part in ("plain", "step"):
            return self._steps(self.engine.plain() if part == "plain" else self.engine)
        if part == "generate":
            self.engine.generate(self.prompts[: self.settings["prompts"]], batch_size=1, **self._options())
        if part == "serve":
            self._serve()
        if part == "bulk":
            sampling = SamplingParams(temperature=1.0)
            tokens, rows = self.settings["bulk_tokens"], self.settings["bulk_rows"]
            requests = [
                Request(
                    prompt=self.prompts[i % 64][: 20 + i % 30],
                    max_new_tokens=tokens - i % 40,
                    seed=i,
                    sampling=sampling,
                )
                for i in range(2 * rows)
            ]
            write_requests(self.engine.target, requests, rows)
        return {"ms": 1000 * (time.perf_counter() - began)}

    def _options(self) -> dict[str, Any]:
        return {"max_new_tokens": self.settings["tokens"], "ignore_eos": True}

    def _steps(self, engine: Engine) -> dict[str, float]:
        """ms per step after the first token, one row."""
        spent, steps = 0.0, 0
        for prompt in self.prompts[: self.settings["prompts"]]:
            stats = engine.generate(prompt, **self._options()).stats
            spent += stats.seconds - stats.first_token_seconds
            steps += stats.steps
        return {"ms": 1000 * spent / steps}

    def _serve(self) -> None:
        """Eight requests at a time, each replaced by the next when it ends; the shape is fixed."""
        if self.served is None:
            batch = Batch(self.engine.target, self.engine.drafter, rows=8, context=1024, kept=4, shapes=[self.shape])
            self.served = Scheduler(batch, FixedSteps(self.shape), Limits(queue=256, chunk=512))
            self.served.start()
        done, left = threading.Event(), [24]

        def hear(event: Any) -> None:
            left[0] -= bool(event.final)
            if not left[0]:
                done.set()

        requests = self.engine.requests(self.prompts[:24], seed=1, **self._options())
        for request in requests:
            self.served.submit([Job(request, hear)])
        done.wait()


def main() -> None:
    worker = Worker(json.loads(sys.stdin.readline()))
    print(json.dumps({"package": redrafter.__file__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(line.split()[1])), flush=True)


if __name__ == "__main__":
    main()
