"""redrafter's own engine and its server's scheduler, without HTTP, in a process of its own. Started by client.py."""

import asyncio
import functools
import time
from typing import Any

from benchmarks.engines.process import serve
from redrafter import Shape, __version__, load
from redrafter.config import SamplingParams
from redrafter.engine import Engine
from redrafter.serve.config import ServeConfig
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Scheduler
from redrafter.serve.server import build_planned
from redrafter.tuning.at_rest import warm_up


class Own:
    """Options: `model`, `drafter`, `device`, `dtype`, `runtime`, `rows`, `context`, and `shape` (None: planned).

    A request drafts unless its sampling parameters have `drafts` false.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.loop, self.version, self._steps = asyncio.new_event_loop(), __version__, 0
        where = {name: options[name] for name in ("device", "dtype", "runtime")}
        shape = None if options["shape"] is None else Shape.of(options["shape"])
        self.engine = load(options["model"], options["drafter"], shape=shape, **where)
        self.scheduler = scheduler(self.engine, options)
        self.scheduler.start()

    async def write(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        (request,) = self.engine.requests(
            [prompt],
            max_new_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            seed=sampling["sampling_seed"],
        )
        ended, tokens, drafts = self.loop.create_future(), list[int](), sampling.get("drafts", True)

        def listen(event: Event) -> None:  # called by the scheduler's thread
            if event.part is not None:
                tokens.extend(event.part.tokens)
            if event.final:
                steps = event.part.stats.steps if event.part is not None else 0
                self.loop.call_soon_threadsafe(end, event.error, steps)

        def end(error: Exception | None, steps: int) -> None:
            self._steps += steps if drafts else 0
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        self.scheduler.submit([Job(request, listen, drafts=drafts, reuses=False)])
        await ended
        return tokens

    async def steps(self) -> int:
        return self._steps

    def flush(self) -> None:
        pass  # no request reuses another's prefix

    def close(self) -> None:
        self.scheduler.stop(0.0)
        self.loop.close()


def scheduler(engine: Engine, options: dict[str, Any]) -> Scheduler:
    """As the server makes it: steps are planned, unless a shape is given."""
    config = ServeConfig(rows=options["rows"], context=options["context"], queue=512)
    made = build_planned(engine, config).scheduler
    if made.batch.recorded:
        warm_up(made.batch, made.policy, [SamplingParams()], say)
    return made


@functools.cache  # each line once
def say(what: str, done: int, total: int) -> None:
    """A line of the log, so that an engine that does not start in time tells how far it came."""
    print(f"{time.strftime('%X')} {what}: {done} of {total}", flush=True)


if __name__ == "__main__":
    serve(Own)
