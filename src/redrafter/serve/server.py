"""From an engine to something that can be served; and the server itself, which ends without losing an answer."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.engine import Engine
from redrafter.runtime.batch import Batch
from redrafter.serve.api import make_app
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.model import Served
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.tuning.chooser import ShapeChooser
from redrafter.tuning.policy import Experience, StepPolicy, policy_for

GPU_LADDER = ("16x5:63", "8x5:31", "8x4:15", "4x3:7", "2x2:3")
CPU_LADDER = ("4x4:7", "3x3:5", "2x3:4", "1x3:3", "1x2:2", "1x1:1")
NGRAM_LADDER = ("1x7:7", "1x4:4", "1x2:2")


def ladder(engine: Engine) -> list[Shape]:
    """Shapes to choose among, the largest first."""
    if isinstance(engine.drafter, NoDrafter):
        return []
    on_gpu = engine.target.device.type == "cuda"
    names = NGRAM_LADDER if isinstance(engine.drafter, NgramDrafter) else GPU_LADDER if on_gpu else CPU_LADDER
    return [Shape.of(name) for name in names]


def make_batch(engine: Engine, config: ServeConfig, shapes: list[Shape], drafter: Drafter | None = None) -> Batch:
    """`drafter`: another than the engine's."""
    on_gpu = engine.target.device.type == "cuda"
    return Batch(
        engine.target,
        drafter or engine.drafter,
        rows=config.rows or (32 if on_gpu else 8),
        context=config.context or (4096 if on_gpu else 2048),
        kept=config.kept,
        shapes=shapes,
        rules=engine.make_rule,
        endings=len(engine.eos_tokens()),
        runtime=engine.runtime,
    )


def first_shape(engine: Engine, batch: Batch, shapes: list[Shape]) -> Shape | None:
    """What is drafted while nothing is measured: the engine's own shape if the batch has room for it."""
    if isinstance(engine.drafter, NoDrafter):
        return None
    return engine.shape if batch.fits(engine.shape) else shapes[0]


def build_adaptive(engine: Engine, config: ServeConfig) -> Served:
    """On a CPU, steps choose what to verify as those of `generate` do, and what steps cost is learned from them."""
    policy, drafter = policy_for(engine.drafter, engine.shape, Experience())
    batch = make_batch(engine, config, engine.shapes, drafter)
    return build(engine, batch, ShapeChooser(None), config, engine.shapes, policy)


def build(
    engine: Engine,
    batch: Batch,
    chooser: ShapeChooser,
    config: ServeConfig,
    later: list[Shape] | None = None,
    policy: StepPolicy | None = None,
) -> Served:
    """`later`: shapes that may be drafted besides those of the chooser."""
    chunk = config.chunk or (512 if engine.target.device.type == "cuda" else 64)
    scheduler = Scheduler(batch, chooser, Limits(queue=config.queue, chunk=chunk), policy)
    promise = engine.promise([*chooser.drafted_shapes, *(later or [])])
    promise.check()
    name = config.name or Path(engine.target.name).name
    return Served(engine, scheduler, name, promise, config.prompt_limit, config.tool_parser)


class Server(uvicorn.Server):
    """On a signal the server takes no new requests; running ones have `grace` seconds to finish and then fail."""

    def __init__(
        self,
        served: Served,
        guard: GuardConfig,
        host: str,
        port: int,
        grace: float = 30.0,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self.served, self.grace, self.ready = served, grace, ready
        super().__init__(
            uvicorn.Config(
                make_app(served, guard),
                host=host,
                port=port,
                log_level="warning",
                timeout_graceful_shutdown=int(grace) + 5,
                limit_concurrency=4 * (served.scheduler.batch.rows + served.scheduler.limits.queue) + 64,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`ready` is called once requests are answered."""
        await super().startup(sockets=sockets)
        if self.ready is not None and self.started:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """While running answers finish, new requests get status 503. A second signal ends the server at once."""
        scheduler = self.served.scheduler
        if scheduler.draining:
            self.should_exit = self.force_exit = True
            threading.Thread(target=scheduler.stop, args=(0.0,), daemon=True).start()
            return
        scheduler.draining = True
        end = super().handle_exit

        def drain() -> None:
            scheduler.stop(self.grace)
            end(sig, frame)

        threading.Thread(target=drain, daemon=True).start()
