"""One SGLang engine in a process of its own. Started by client.py; imports SGLang and nothing of this repository.

Its only argument is a JSON object: `engine` (SGLang's options) and `folder`. The process answers each line of its
standard input, a JSON object, by a file `folder`/N.json for the N-th line; 0.json says that the engine is up.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    folder, started = Path(given["folder"]), time.perf_counter()
    import sglang

    engine = sglang.Engine(**given["engine"])
    answer(folder, 0, {"start_seconds": time.perf_counter() - started, "version": sglang.__version__})
    for number, line in enumerate(sys.stdin, 1):
        asked = json.loads(line)
        for _ in range(40 if asked.get("flush") else 0):
            if getattr(engine.flush_cache(), "success", True):
                break
            time.sleep(0.05)  # a step of finished requests may still run
        answer(folder, number, engine.loop.run_until_complete(write(engine, asked)))
    engine.shutdown()


async def write(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Write all prompts, so many at once; a finished one makes room for the next."""
    room = asyncio.Semaphore(asked["concurrency"])

    async def one(prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        async with room:
            return await engine.async_generate(input_ids=prompt, sampling_params=sampling)  # type: ignore[no-any-return]

    started = time.perf_counter()
    done = await asyncio.gather(*(one(p, s) for p, s in zip(asked["prompts"], asked["sampling"], strict=True)))
    seconds = time.perf_counter() - started
    info = [d["meta_info"] for d in done]
    return {
        "seconds": seconds,
        "texts": [d["output_ids"] for d in done],
        "steps": sum(i.get("spec_verify_ct", 0) for i in info),
        "cached": sum(i.get("cached_tokens", 0) for i in info),
    }


def answer(folder: Path, number: int, content: dict[str, Any]) -> None:
    scratch = folder / f"{number}.part"
    scratch.write_text(json.dumps(content))
    scratch.rename(folder / f"{number}.json")


if __name__ == "__main__":  # SGLang starts its own processes, which import this file again
    main()
