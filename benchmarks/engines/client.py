"""Engines that write texts for benchmarks/engines_gpu.py: SGLang in another process, or redrafter's own in this one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redrafter import Engine
from redrafter.errors import RedrafterError

PROCESS = Path(__file__).with_name("sglang_process.py")


class EngineFailed(RedrafterError):
    """An engine did not start, or did not answer."""


@dataclass(frozen=True)
class Written:
    """What an engine wrote for a list of prompts."""

    texts: list[list[int]]
    seconds: float
    steps: int  # of speculative decoding, over all texts; 0 where plain

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_step(self) -> float:
        """Without the first token of each text, which the prompt's pass chooses."""
        return (self.tokens - len(self.texts)) / self.steps if self.steps else 1.0


class Writer(Protocol):
    """Writes prompts (token ids), `concurrency` at once, each with SGLang's sampling parameters."""

    def write(
        self, prompts: Sequence[list[int]], sampling: Sequence[Mapping[str, Any]], concurrency: int
    ) -> Written: ...

    def close(self) -> None: ...


class SglangWriter:
    """SGLang in another process. It starts in the background; the first question waits for it."""

    def __init__(self, engine: Mapping[str, Any], environment: Mapping[str, str], log: Path, patience: float) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder, self.log, self.patience, self.asked = Path(self._scratch.name), log, patience, 0
        given = json.dumps({"engine": dict(engine), "folder": str(self.folder)})
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(PROCESS), given],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                text=True,
                start_new_session=True,
            )

    def started(self) -> float:
        """Wait until the engine is up; return how long it took to start."""
        return float(self._answer(0)["start_seconds"])

    def write(self, prompts: Sequence[list[int]], sampling: Sequence[Mapping[str, Any]], concurrency: int) -> Written:
        self.started()
        self.asked += 1
        asked = {"prompts": list(prompts), "sampling": list(sampling), "concurrency": concurrency, "flush": True}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        found = self._answer(self.asked)
        return Written(found["texts"], found["seconds"], found["steps"])

    def _answer(self, number: int) -> dict[str, Any]:
        path, end = self.folder / f"{number}.json", time.monotonic() + self.patience
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                state = "ended" if self.process.poll() is not None else f"gave no answer in {self.patience:.0f} s"
                lines = self.log.read_text(errors="replace").splitlines()
                raise EngineFailed(f"SGLang {state}; the end of {self.log}:\n" + "\n".join(lines[-40:]))
            time.sleep(0.02)
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process and those it started."""
        with contextlib.suppress(ProcessLookupError):  # an engine that failed may leave its scheduler behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._scratch.cleanup()


class OwnWriter:
    """redrafter's own engine, asked in the same way."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def write(self, prompts: Sequence[list[int]], sampling: Sequence[Mapping[str, Any]], concurrency: int) -> Written:
        started, done = time.perf_counter(), []
        for start in range(0, len(prompts), concurrency):
            here = sampling[start]
            done += self.engine.generate(
                list(prompts[start : start + concurrency]),
                batch_size=concurrency,
                max_new_tokens=here["max_new_tokens"],
                temperature=here["temperature"],
                seed=[s.get("sampling_seed", 0) for s in sampling[start : start + concurrency]],
            )
        seconds = time.perf_counter() - started
        return Written([d.tokens for d in done], seconds, sum(d.stats.steps for d in done))

    def close(self) -> None:
        pass
