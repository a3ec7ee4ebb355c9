"""Request bodies, read whole and within bounds, so that nothing behind waits for a client."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from starlette.types import Receive

from redrafter.serve.config import GuardConfig
from redrafter.serve.errors import Refused

SMALL = 64 * 1024
"""Bytes of each body that are always taken."""
ROOM = 8
"""Bodies of the greatest length that fit into memory together; one client has half of this room."""

MOST_FIELDS = 2**15
"""Objects, lists and fields in a body. Each takes time and memory to read."""
SIGNS = b'{[:"'
OTHERS = bytes(set(range(256)) - set(SIGNS))


class Gone(Exception):
    """The client left before it had sent all."""


class Bodies:
    """The bodies of all requests under way. They count as they arrive: a length that is only declared takes no room."""

    def __init__(self, config: GuardConfig) -> None:
        self.config, self.room = config, ROOM * config.body_bytes
        self.held: Counter[str] = Counter()  # bytes by client

    async def read(self, client: str, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """A body that holds room until it is released. Raises Refused or Gone."""
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, wrong_type(kind))
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            raise Refused(400, f"Content-Length must be a number, got {declared[:20]!r}")
        self._check_size(int(declared))
        size, parts = 0, []
        try:
            async with asyncio.timeout(self.config.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    parts.append(message.get("body", b""))
                    self._check_size(size + len(parts[-1]))
                    self._hold(client, size, size + len(parts[-1]))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
        except BaseException as error:
            self.release(client, size)
            if isinstance(error, TimeoutError):
                refused = Refused(408, f"the body did not arrive within {self.config.body_seconds:g} seconds")
                refused.response.headers["connection"] = "close"
                raise refused from None
            raise
        return b"".join(parts)

    def release(self, client: str, size: int) -> None:
        self.held[client] -= max(0, size - SMALL)
        if not self.held[client]:
            del self.held[client]

    def _hold(self, client: str, before: int, size: int) -> None:
        more = max(0, size - SMALL) - max(0, before - SMALL)
        if more and (self.held.total() + more > self.room or self.held[client] + more > self.room // 2):
            raise Refused(503, "too many large bodies are under way: try again later", code="busy", retry_after=1)
        self.held[client] += more

    def _check_size(self, size: int) -> None:
        if size > self.config.body_bytes:
            raise Refused(413, f"the body is longer than {self.config.body_bytes} bytes", code="body_too_large")


def check_fields(body: bytes) -> None:
    """Refuse JSON that takes much longer to read than its length says."""
    if sum(map(body.count, (b"{", b"[", b":"))) > MOST_FIELDS and (found := fields_in(body)) > MOST_FIELDS:
        raise Refused(400, f"the body has {found} objects, lists and fields, and at most {MOST_FIELDS} are taken")


def fields_in(body: bytes) -> int:
    """How many objects, lists and fields JSON has; what stands in its strings does not count.

    >>> fields_in(rb'{"a{{": [1, 2, "[\\":"]}')
    3
    """
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    bare = bare.translate(None, OTHERS)
    return sum(map(len, bare.split(b'"')[::2]))


def wrong_type(kind: str) -> str:
    """
    >>> wrong_type("")
    "the body must be JSON: send the header 'Content-Type: application/json', got no Content-Type"
    """
    got = f"got {kind[:80]!r}" if kind else "got no Content-Type"
    return f"the body must be JSON: send the header 'Content-Type: application/json', {got}"
