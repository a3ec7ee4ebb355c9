"""One SGLang engine in a process of its own. Started by client.py."""

import time
from typing import Any

from benchmarks.engines.process import serve


class Sglang:
    """Sampling parameters are SGLang's own."""

    def __init__(self, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**options)
        self.loop, self.version, self._steps = self.engine.loop, sglang.__version__, 0

    async def write(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        done = await self.engine.async_generate(input_ids=prompt, sampling_params=sampling)
        self._steps += done["meta_info"].get("spec_verify_ct", 0)
        return list(done["output_ids"])

    async def steps(self) -> int:
        return self._steps

    def flush(self) -> None:
        for _ in range(40):
            if getattr(self.engine.flush_cache(), "success", True):
                return
            time.sleep(0.05)  # a step of finished requests may still run

    def close(self) -> None:
        self.engine.shutdown()


if __name__ == "__main__":  # SGLang starts its own processes, which import this file again
    serve(Sglang)
