"""What the processes of all engines share: they answer the questions of client.py. Imports the standard library alone.

The only argument of such a process is a JSON object: `engine` (the engine's options) and `folder`. The process answers
each line of its standard input, a JSON object, by a file `folder`/N.json for the N-th line; 0.json says that the engine
is up.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class ServedEngine(Protocol):
    """An engine inside its process."""

    loop: asyncio.AbstractEventLoop
    version: str

    async def write(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        """The tokens of the answer to one request."""
        ...

    async def steps(self) -> int:
        """How many steps of speculative decoding requests took since the engine started; 0 where plain."""
        ...

    def flush(self) -> None:
        """Forget the prefixes of earlier requests."""
        ...

    def close(self) -> None: ...


def serve(start: Callable[[dict[str, Any]], ServedEngine]) -> None:
    """Start an engine and answer until the standard input ends."""
    given = json.loads(sys.argv[1])
    folder, began = Path(given["folder"]), time.perf_counter()
    engine = start(given["engine"])
    put(folder, 0, {"start_seconds": time.perf_counter() - began, "version": engine.version})
    for number, line in enumerate(sys.stdin, 1):
        put(folder, number, answer(engine, json.loads(line)))
    engine.close()


def answer(engine: ServedEngine, asked: dict[str, Any]) -> dict[str, Any]:
    """Write all prompts of a question."""
    engine.flush()
    return engine.loop.run_until_complete(_answer(engine, asked))


async def _answer(engine: ServedEngine, asked: dict[str, Any]) -> dict[str, Any]:
    """A request comes at its arrival time and waits until fewer than `concurrency` requests are under way."""
    prompts, room = asked["prompts"], asyncio.Semaphore(asked["concurrency"])
    arrivals = asked.get("arrivals") or [0.0] * len(prompts)
    before, began = await engine.steps(), time.perf_counter()

    async def one(prompt: list[int], sampling: dict[str, Any], arrival: float) -> tuple[list[int], float]:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        async with room:
            text = await engine.write(prompt, sampling)
        return text, time.perf_counter() - began - arrival

    done = await asyncio.gather(*map(one, prompts, asked["sampling"], arrivals))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "texts": [text for text, _ in done],
        "latencies": [latency for _, latency in done],
        "steps": await engine.steps() - before,
    }


def put(folder: Path, number: int, content: dict[str, Any]) -> None:
    scratch = folder / f"{number}.part"
    scratch.write_text(json.dumps(content))
    scratch.rename(folder / f"{number}.json")
