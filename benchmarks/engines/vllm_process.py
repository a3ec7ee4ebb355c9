"""One vLLM engine in a process of its own. Started by client.py."""

import asyncio
import itertools
from typing import Any

from benchmarks.engines.process import serve

TOKENS, ACCEPTED = "vllm:generation_tokens", "vllm:spec_decode_num_accepted_tokens"


class Vllm:
    """The engine behind vLLM's server, without HTTP. Options are those of `AsyncEngineArgs`."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self.loop, self.version, self.names = asyncio.new_event_loop(), vllm.__version__, itertools.count()
        self.ended = 0  # texts
        self.engine = self.loop.run_until_complete(self._start(options))

    async def _start(self, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        config = engine.vllm_config
        print(
            f"runner V{2 if config.use_v2_model_runner else 1}, CUDA graphs {config.compilation_config.cudagraph_mode} "
            f"of {config.compilation_config.cudagraph_capture_sizes} tokens, asynchronous scheduling "
            f"{config.scheduler_config.async_scheduling}",
            flush=True,
        )
        return engine

    async def write(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(
            temperature=sampling["temperature"],
            max_tokens=sampling["max_new_tokens"],
            seed=sampling["sampling_seed"] if sampling["temperature"] else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        tokens: list[int] = []
        async for output in self.engine.generate({"prompt_token_ids": prompt}, wanted, str(next(self.names))):
            tokens = list(output.outputs[0].token_ids)
        self.ended += 1
        return tokens

    async def steps(self) -> int:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        await asyncio.sleep(0.1)  # a text's last step is counted after the text is handed over
        # Not the number of drafts: a step may have none. A text's first token is the prompt's. vLLM also counts tokens
        # accepted past the end of a text, about one in each text.
        found = {m.name: int(m.value) for m in get_metrics_snapshot() if m.name in (TOKENS, ACCEPTED)}
        return found.get(TOKENS, 0) - found.get(ACCEPTED, 0) - self.ended

    def flush(self) -> None:
        pass  # the prefix cache is off

    def close(self) -> None:
        self.engine.shutdown()


if __name__ == "__main__":  # vLLM starts its own processes, which import this file again
    serve(Vllm)
