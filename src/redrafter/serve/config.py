"""What can be set about a server; needs nothing but this package."""

from dataclasses import dataclass

from redrafter.config import require


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How much is served at once."""

    rows: int | None = None
    """Answers written at once (default: 8 on a CPU, 32 on a GPU)."""
    context: int | None = None
    """Tokens of a prompt and its answer, at most; each row has room for as many (default: 2048 on a CPU, 4096 on a GPU,
    or the model's own context if that is smaller)."""
    kept: int = 4
    """Ended rows whose texts are kept, for prompts that begin like them."""
    remember_answers: int = 0
    """Bytes of memory for answers to remember: a prompt that its API key has asked before copies from its last answer.
    No text changes (0: nothing is remembered)."""
    queue: int = 64
    """Answers that may wait for a row; more are refused with status 429."""
    prompt_limit: int | None = None
    """Longest prompt in tokens (default: the context less one)."""
    chunk: int | None = None
    """Prompt tokens read between two steps of others (default: 64 on a CPU, 512 on a GPU)."""
    name: str | None = None
    """What clients call the model (default: the last part of its name)."""
    tool_parser: str | None = None
    """How the model writes tool calls: hermes (Qwen too), llama3, mistral or json (default: by its chat template)."""

    def __post_init__(self) -> None:
        least_of = {
            "rows": 1,
            "context": 2,
            "kept": 0,
            "remember_answers": 0,
            "queue": 0,
            "prompt_limit": 1,
            "chunk": 1,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What a client may send before anybody looks at it."""

    api_key: str | None = None
    """Clients must send it as a bearer token (none: everybody who reaches the port may ask)."""
    body_bytes: int = 4 * 2**20
    """Longest body."""
    body_seconds: float = 30.0
    """How long a body may take to arrive."""

    cors: tuple[str, ...] = ()
    """Origin whose pages may call the API from a browser, or * for all; repeatable (none: no other origin)."""
    logs: bool = False
    """Log a line for each request."""

    def __post_init__(self) -> None:
        require(self.api_key != "", "the API key is empty")
        require(self.body_bytes >= 1, f"body_bytes must be at least 1, got {self.body_bytes}")
        require(self.body_seconds > 0, f"body_seconds must be positive, got {self.body_seconds}")
