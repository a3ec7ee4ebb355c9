"""From an engine to something that can be served; and the server itself, which ends without losing an answer."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from redrafter.drafters.traits import recall_of
from redrafter.engine import Engine
from redrafter.errors import ConfigError
from redrafter.planning.steps import FixedSteps, Steps, planner_for, steps_of
from redrafter.runtime.batch import Batch
from redrafter.serve.api import make_app
from redrafter.serve.batches import make_batch
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.connection import Connection
from redrafter.serve.model import Served
from redrafter.serve.past_answers import PastAnswers
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.tuning.store import use_profile

BEAMS_PER_SIZE = 2
"""For each number of rows, among which the planner of a GPU chooses."""


def build_planned(engine: Engine, config: ServeConfig) -> Served:
    """Steps are planned as those of `generate` are, and under other rules than `seeded` too."""
    if not engine.adapts:
        shape = engine.shape if engine.drafts else None
        batch = make_batch(engine, config, [] if shape is None else [shape])
        return build(engine, batch, FixedSteps(shape), config)
    seeded = engine.rule_config.name == "seeded"
    planner, drafter = planner_for(engine.drafter, engine.shape, engine.target.device, BEAMS_PER_SIZE, seeded)
    use_profile(planner.costs, engine.target, engine.drafter, engine.runtime)
    return build(engine, make_batch(engine, config, engine.shapes, drafter), steps_of(planner), config)


def build(engine: Engine, batch: Batch, policy: Steps, config: ServeConfig) -> Served:
    past = past_answers(engine, config)
    scheduler = Scheduler(
        batch, policy, Limits(queue=config.queue, chunk=config.chunk_for(engine.target.device.type)), past
    )
    promise = engine.promise()
    promise.check()
    name = config.name or Path(engine.target.name).name
    return Served(engine, scheduler, name, promise, config.prompt_limit, config.tool_parser)


def past_answers(engine: Engine, config: ServeConfig) -> PastAnswers | None:
    if not config.remember_answers:
        return None
    if recall_of(engine.drafter) is None:
        raise ConfigError("remembered answers are copied by n-grams: use --drafter ngram, or add +ngram to its name")
    if engine.rule_config.name != "seeded":  # under other rules a guess may change the text
        raise ConfigError(f"remembered answers need the rule seeded, got {engine.rule_config.name}")
    return PastAnswers(config.remember_answers)


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
        self.unsaid: OSError | None = None
        super().__init__(
            uvicorn.Config(
                make_app(served, guard),
                host=host,
                port=port,
                log_level="warning",
                timeout_graceful_shutdown=int(grace) + 5,
                http=Connection,
                ws="none",
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`ready` is called once requests are answered; if it cannot write, the server ends."""
        await super().startup(sockets=sockets)
        if self.ready is not None and self.started:
            try:
                self.ready()
            except OSError as error:
                self.unsaid = error
                await self.shutdown(sockets=sockets)
                self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets=sockets)
        if self.unsaid is not None:
            raise self.unsaid

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
