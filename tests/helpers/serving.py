"""A server on a port of its own, with the toy that speaks letters behind it: what tests over HTTP share."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from redrafter import Engine, Shape
from redrafter.drafters import NoDrafter
from redrafter.planning.steps import FixedSteps
from redrafter.serve.batches import make_batch
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.model import Served
from redrafter.serve.server import Server, build
from redrafter.targets import Target
from tests.helpers.letters import make_target
from tests.helpers.zoo import recurrent_drafter

SHAPE = Shape(width=3, length=3)
NAME = "letters"
SLOW = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}


def make_served(target: Target | None = None, **changes: Any) -> Served:
    target = target or make_target()
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE)
    config = ServeConfig(**({"rows": 4, "context": 90, "queue": 100, "name": NAME} | changes))
    return build(engine, make_batch(engine, config, [SHAPE]), FixedSteps(SHAPE), config)


def plain(served: Served) -> Engine:
    return Engine(served.engine.target, NoDrafter())


@contextlib.contextmanager
def running(served: Served, grace: float = 5.0, **guard: Any) -> Iterator[str]:
    """The server's address, for as long as it runs."""
    server = Server(served, GuardConfig(**guard), "127.0.0.1", 0, grace)
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.handle_exit(15, None)
        thread.join(30)
        assert not thread.is_alive(), "the server does not end"


def wait_until(true: Any, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(true())
