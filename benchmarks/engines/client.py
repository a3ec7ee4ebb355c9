"""Engines that write texts for benchmarks/engines_gpu.py: each in a process of its own, or one in this process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engines.process import ServedEngine, answer
from redrafter.errors import RedrafterError

TAIL = 40
"""Lines of an engine's log that are kept when it fails."""


class EngineFailed(RedrafterError):
    """An engine did not start, or did not answer."""


@dataclass(frozen=True)
class Written:
    """What an engine wrote for a list of prompts."""

    texts: list[list[int]]
    seconds: float
    steps: int  # of speculative decoding, over all texts; 0 where plain
    latencies: list[float] = field(default_factory=list)  # seconds from each request's arrival to its end

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_step(self) -> float:
        """Without the first token of each text, which the prompt's pass chooses."""
        return (self.tokens - len(self.texts)) / self.steps if self.steps else 1.0

    @property
    def tokens_per_second_of_a_request(self) -> float:
        """The speed that one user sees, waiting included, over all requests."""
        return self.tokens / sum(self.latencies)


class Writer(Protocol):
    """Writes prompts (token ids), at most `concurrency` at once, each with SGLang's sampling parameters.

    `arrivals`: seconds after which each request comes; without them all come at once.
    """

    def write(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[Mapping[str, Any]],
        concurrency: int,
        arrivals: Sequence[float] | None = None,
    ) -> Written: ...

    def close(self) -> None: ...


class ProcessWriter:
    """An engine in another process. It starts in the background; the first question waits for it."""

    def __init__(
        self, script: Path, engine: Mapping[str, Any], environment: Mapping[str, str], log: Path, patience: float
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder, self.log, self.patience, self.asked = Path(self._scratch.name), log, patience, 0
        given = json.dumps({"engine": dict(engine), "folder": str(self.folder)})
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script), given],
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

    def write(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[Mapping[str, Any]],
        concurrency: int,
        arrivals: Sequence[float] | None = None,
    ) -> Written:
        self.started()
        self.asked += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question(prompts, sampling, concurrency, arrivals)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # the process ended; the next line says how
            pass
        return Written(**self._answer(self.asked))

    def _answer(self, number: int) -> dict[str, Any]:
        path, end = self.folder / f"{number}.json", time.monotonic() + self.patience
        while not path.exists():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > end:
                state = "ended" if ended else f"gave no answer in {self.patience:.0f} s"
                lines = self.log.read_text(errors="replace").splitlines()
                raise EngineFailed(f"the engine {state}; the end of {self.log}:\n" + "\n".join(lines[-TAIL:]))
            time.sleep(0.02)
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process and those it started."""
        with contextlib.suppress(ProcessLookupError):  # an engine that failed may leave its scheduler behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._scratch.cleanup()


class PlainWriter:
    """Plain decoding by an engine that drafts or not as each request asks. The engine belongs to the other writer."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def write(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[Mapping[str, Any]],
        concurrency: int,
        arrivals: Sequence[float] | None = None,
    ) -> Written:
        return self.writer.write(prompts, [{**s, "drafts": False} for s in sampling], concurrency, arrivals)

    def close(self) -> None:
        pass


class HereWriter:
    """An engine in this process."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine

    def write(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[Mapping[str, Any]],
        concurrency: int,
        arrivals: Sequence[float] | None = None,
    ) -> Written:
        return Written(**answer(self.engine, question(prompts, sampling, concurrency, arrivals)))

    def close(self) -> None:
        self.engine.close()


def question(
    prompts: Sequence[list[int]],
    sampling: Sequence[Mapping[str, Any]],
    concurrency: int,
    arrivals: Sequence[float] | None,
) -> dict[str, Any]:
    """What `process.answer` takes."""
    asked: dict[str, Any] = {"prompts": list(prompts), "sampling": [dict(s) for s in sampling]}
    return asked | {"concurrency": concurrency, "arrivals": None if arrivals is None else list(arrivals)}
