"""What stands before the API: a key, a limit on bodies, and no patience without end for slow ones."""

import asyncio
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.config import GuardConfig
from redrafter.serve.errors import failure

KEYED = ("/v1", "/tokenize", "/tokenizer_info", "/detokenize")
"""Paths that need the key, with everything below them."""


class Guard:
    """ASGI middleware. Bodies are read here, whole, so that nothing behind waits for a client."""

    def __init__(self, app: ASGIApp, config: GuardConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"].startswith(KEYED) and not self._knows_key(headers):
            await failure(
                401, "missing or wrong API key: send it as 'Authorization: Bearer ...'", code="invalid_api_key"
            )(scope, receive, send)
            return
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        refused = None if kind == "application/json" else failure(415, wrong_type(kind))
        try:
            declared = headers.get(b"content-length", b"0")
            body = None
            if refused is not None:
                pass
            elif not declared.isdigit():
                refused = failure(400, f"Content-Length must be a number, got {declared[:20]!r}")
            elif int(declared) <= self.config.body_bytes:
                body = await asyncio.wait_for(self._body(receive), self.config.body_seconds)
            if body is None and refused is None:
                refused = failure(413, f"the body is longer than {self.config.body_bytes} bytes", code="body_too_large")
        except TimeoutError:
            refused = failure(408, f"the body did not arrive within {self.config.body_seconds:g} seconds")
        except _Gone:
            return
        if refused is not None:
            refused.headers["connection"] = "close"  # what else the client has to send is not waited for
            await refused(scope, receive, send)
            return
        assert body is not None
        await self.app(scope, _replayed(body, receive), send)

    def _knows_key(self, headers: dict[bytes, bytes]) -> bool:
        if self.config.api_key is None:
            return True
        given = headers.get(b"authorization", b"")
        return secrets.compare_digest(given, b"Bearer " + self.config.api_key.encode())

    async def _body(self, receive: Receive) -> bytes | None:
        """None if it is too long."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.config.body_bytes:
                return None
            if not message.get("more_body"):
                return b"".join(parts)


def wrong_type(kind: str) -> str:
    """
    >>> wrong_type("")
    "the body must be JSON: send the header 'Content-Type: application/json', got no Content-Type"
    """
    got = f"got {kind[:80]!r}" if kind else "got no Content-Type"
    return f"the body must be JSON: send the header 'Content-Type: application/json', {got}"


class _Gone(Exception):
    """The client left before it had said all."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """First the body, then what really comes: a client's leaving."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return first.pop() if first else await receive()

    return again
