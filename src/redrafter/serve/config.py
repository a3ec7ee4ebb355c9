"""What can be set about a server; needs nothing but this package."""

from dataclasses import dataclass
from typing import Annotated

from redrafter.bounds import Bounds, Bytes, Count, CountOrZero, Seconds, check, shown
from redrafter.config import require

HostName = Annotated[str, Bounds(least=1, most=255)]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How much is served at once."""

    rows: Annotated[int, Bounds(least=1, most=2**16)] | None = None
    """Answers written at once (default: 8 on a CPU, 32 on a GPU)."""
    context: Annotated[int, Bounds(least=2, most=2**31 - 1)] | None = None
    """Tokens of a prompt and its answer, at most; each row has room for as many (default: 2048 on a CPU, 4096 on a GPU,
    or the model's own context if that is smaller)."""
    kept: Annotated[int, Bounds(least=0, most=2**16)] = 4
    """Ended rows whose texts are kept, for prompts that begin like them."""
    remember_answers: Bytes = 0
    """Bytes of memory for answers to remember: a prompt that its API key has asked before copies from its last answer.
    No text changes (0: nothing is remembered)."""
    queue: CountOrZero = 64
    """Answers that may wait for a row; more are refused with status 429."""
    prompt_limit: Count | None = None
    """Longest prompt in tokens (default: the context less one)."""
    chunk: Count | None = None
    """Prompt tokens read in a step of others, or before it (default: 64 on a CPU, 128 on a GPU; recorded passes
    read 512 at most)."""
    name: Annotated[str, Bounds(least=1, most=256)] | None = None
    """What clients call the model (default: the last part of its name)."""
    tool_parser: str | None = None
    """How the model writes tool calls: hermes (Qwen too), llama3, mistral or json (default: by its chat template)."""

    def chunk_for(self, device: str) -> int:
        """`chunk` or its default on this kind of device."""
        return self.chunk or (128 if device == "cuda" else 64)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What a client may send before anybody looks at it."""

    api_key: str | None = None
    """Clients must send it as a bearer token (none: everybody who reaches the port may ask)."""
    body_bytes: Count = 4 * 2**20
    """Longest body."""
    body_seconds: Seconds = 30.0
    """How long a body may take to arrive."""

    hosts: tuple[HostName, ...] | None = None
    """Name in the header Host that is accepted besides localhost and loopback addresses; repeatable (none: any name,
    but without a key on this machine no other: a page in a browser could reach the server by a name of its own)."""
    cors: tuple[str, ...] = ()
    """Origin whose pages may call the API from a browser, or * for all; repeatable (none: no other origin)."""
    logs: bool = False
    """Log a line for each request."""

    def __post_init__(self) -> None:
        check(self)
        require(self.api_key != "", "the API key is empty")
        for name in self.hosts or ():
            require("/" not in name, f"--allow-host takes a name without scheme and path, got {shown(name)}")
