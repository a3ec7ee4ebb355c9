"""Load test of a server over HTTP: requests arrive at random, and the client times every answer.

Requests arrive as a Poisson process. At most `concurrency` requests run at once; the others wait in the client. Two
contenders get the same prompts at the same arrival times, in turns.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redrafter.errors import ConfigError

TIMEOUT = 600.0
MIN_ROUNDS = 5
"""Rounds from which on an interval is drawn from rounds; fewer say little about how rounds differ."""


@dataclass(frozen=True)
class Timed:
    """The times of one request, in seconds since the test began, and its answer."""

    sent: float
    first: float
    ended: float
    tokens: int
    steps: int
    text: str

    @property
    def first_ms(self) -> float:
        return 1000 * (self.first - self.sent)

    @property
    def token_ms(self) -> float:
        """Return milliseconds per token after the first."""
        return 1000 * (self.ended - self.first) / max(1, self.tokens - 1)


class Client:
    """A minimal HTTP client, which leaves the CPU to the server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"the server's address must look like http://127.0.0.1:8000, got {url!r}")
        self.host, self.port, self.key = parts.hostname, parts.port or 80, key

    @contextlib.asynccontextmanager
    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
        """Send a request; yield the reader of the body, and the status."""
        content = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**20)
        except OSError as error:
            raise ConfigError(
                f"no server at {self.host}:{self.port} ({error.strerror or error}): start one with redrafter serve"
            ) from error
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + content)
            await writer.drain()
            status = (await reader.readline()).split()
            if len(status) < 2:
                raise ConfigError(f"the server at {self.host}:{self.port} closed the connection without an answer")
            while (await reader.readline()).strip():
                pass
            yield reader, int(status[1])
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def json(self, path: str) -> Any:
        async with self.ask("GET", path) as (reader, status):
            text = (await reader.read()).decode()
        if status != 200:
            raise ConfigError(f"{path} answers with status {status}: {text[:200]}")
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    async def timed(self, body: dict[str, Any], began: float) -> Timed:
        """Time a streamed chat completion."""
        sent = time.perf_counter() - began
        first = last = 0.0
        usage: dict[str, Any] = {}
        pieces = []
        async with self.ask("POST", "/v1/chat/completions", body) as (reader, status):
            if status != 200:
                text = (await reader.read()).decode()
                raise ConfigError(f"the server refuses a request with status {status}: {text[:300]}")
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter() - began
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConfigError(f"an answer failed: {event['error']['message']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["delta"].get("content") or choice["finish_reason"]:
                        first, last = first or now, now
                        pieces.append(choice["delta"].get("content") or "")
        if not usage:
            raise ConfigError("an answer ended without usage: the connection was lost")
        steps = usage.get("speculative", {}).get("steps", 0)
        return Timed(sent, first, last, int(usage["completion_tokens"]), int(steps), "".join(pieces))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The concurrency and arrival rate of requests."""

    concurrency: int
    """Maximum number of running requests."""
    rate: float
    """Arrivals per second."""
    seed: int = 0

    def arrivals(self, count: int) -> list[float]:
        """Return arrival times of a Poisson process, the first at 0."""
        chance = random.Random(self.seed)
        moments = [0.0]
        for _ in range(count - 1):
            moments.append(moments[-1] + chance.expovariate(self.rate))
        return moments


async def offer(client: Client, load: Load, bodies: Sequence[dict[str, Any]]) -> list[Timed]:
    """Send all requests under this load; return their times in order."""
    slots = asyncio.Semaphore(load.concurrency)
    began = time.perf_counter()

    async def one(body: dict[str, Any], moment: float) -> Timed:
        await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
        async with slots:
            return await asyncio.wait_for(client.timed(body, began), TIMEOUT)

    moments = load.arrivals(len(bodies))
    return list(await asyncio.gather(*(one(b, m) for b, m in zip(bodies, moments, strict=True))))


@dataclass(frozen=True)
class Figures:
    """The figures of a contender under one load."""

    answers: int
    tokens: int
    first_ms: float
    first_ms_p99: float
    token_ms: float
    token_ms_p99: float
    tokens_per_second: float
    tokens_per_step: float
    under_way: float
    """Mean number of running requests."""


def figures(every: Sequence[Sequence[Timed]]) -> Figures:
    """Summarise several rounds of the same load."""
    flat = [t for run in every for t in run]
    spans = [max(t.ended for t in run) - min(t.sent for t in run) for run in every]
    tokens, steps = sum(t.tokens for t in flat), sum(t.steps for t in flat)
    return Figures(
        answers=len(flat),
        tokens=tokens,
        first_ms=sum(t.first_ms for t in flat) / len(flat),
        first_ms_p99=percentile([t.first_ms for t in flat], 0.99),
        token_ms=mean_token_ms(flat),
        token_ms_p99=percentile([t.token_ms for t in flat], 0.99),
        tokens_per_second=tokens / sum(spans),
        tokens_per_step=(tokens - len(flat)) / steps if steps else 1.0,
        under_way=sum(t.ended - t.sent for t in flat) / sum(spans),
    )


def mean_token_ms(every: Sequence[Timed]) -> float:
    """Return the mean over all tokens, so that long answers weigh more."""
    return 1000 * sum(t.ended - t.first for t in every) / max(1, sum(t.tokens - 1 for t in every))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of the values.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([1.0], 0.99)
    (2.0, 1.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000 * len(ordered)) // 1000) - 1)]


def ratio(
    plain: Sequence[Sequence[Timed]], other: Sequence[Sequence[Timed]], seed: int = 0, draws: int = 1000
) -> tuple[float, float, float]:
    """Return the speedup in time per token over all rounds, with a 95 % bootstrap interval.

    The bootstrap draws rounds, since other work on the machine slows down all answers of a round. With fewer than
    `MIN_ROUNDS` rounds it draws pairs of answers.
    """
    rounds = [
        [(a, b) for a, b in zip(*both, strict=True) if min(a.tokens, b.tokens) > 1]
        for both in zip(plain, other, strict=True)
    ]
    if not any(rounds):
        raise ConfigError("every answer has one token: there is no time between tokens to compare")
    units = rounds if len(rounds) >= MIN_ROUNDS else [[pair] for pairs in rounds for pair in pairs]

    def of(drawn: Sequence[list[tuple[Timed, Timed]]]) -> float:
        return mean_token_ms([a for pairs in drawn for a, _ in pairs]) / mean_token_ms(
            [b for pairs in drawn for _, b in pairs]
        )

    chance = random.Random(seed)
    resampled = [of([chance.choice(units) for _ in units]) for _ in range(draws)]
    return of(units), percentile(resampled, 0.025), percentile(resampled, 0.975)
