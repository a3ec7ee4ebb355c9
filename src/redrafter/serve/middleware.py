"""What stands before the API: the names of the server, a key, limits on bodies and on requests under way."""

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.bodies import SMALL, Bodies, Gone, check_fields
from redrafter.serve.config import GuardConfig
from redrafter.serve.errors import Refused
from redrafter.serve.hosts import accepts, name_of
from redrafter.serve.reading import release_memory
from redrafter.serve.turns import Turn, Turns

KEYED = ("/v1", "/tokenize", "/tokenizer_info", "/detokenize")
"""Paths that need the key, with everything below them."""
AT_ONCE = 2
"""Large bodies that become values and tokens at once. It takes the memory of several bodies, and a processor core."""


class Guard:
    """ASGI middleware. Bodies are read here, and large ones take turns.

    most: requests with a body that may be under way. `/health` and the like are not counted, nor is a request
    whose body has not arrived: silent clients shut nobody out.
    """

    def __init__(self, app: ASGIApp, config: GuardConfig, most: int) -> None:
        self.app, self.config, self.most = app, config, most
        self.bodies, self.turns, self.under_way = Bodies(config), Turns(AT_ONCE), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            self._check_key(scope["path"], headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await self._with_body(scope, headers, receive, send)
            else:
                await self.app(scope, receive, send)
        except Refused as refused:
            await refused.response(scope, receive, send)
        except Gone:
            pass

    def _check_host(self, host: str) -> None:
        names = self.config.hosts
        if names is not None and not accepts(host, names):
            raise Refused(
                403,
                f"this server is not called {name_of(host)[:80]!r}: call it localhost, or start it with --allow-host",
                code="unknown_host",
            )

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        key = self.config.api_key
        if key is None or not path.startswith(KEYED):
            return
        if not secrets.compare_digest(headers.get(b"authorization", b""), b"Bearer " + key.encode()):
            message = "missing or wrong API key: send it as 'Authorization: Bearer ...'"
            raise Refused(401, message, code="invalid_api_key")

    async def _with_body(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        client = (scope.get("client") or ("",))[0]
        body = await self.bodies.read(client, headers, receive)
        turn = scope.setdefault("state", {})["turn"] = Turn(self.turns, client)
        self.under_way += 1
        try:
            if self.under_way > self.most:
                raise Refused(503, f"{self.most} requests are under way: try again later", code="busy", retry_after=1)
            if len(body) > SMALL:
                await turn.begin()
                await run_in_threadpool(check_fields, body)
            await self.app(scope, _replayed(body, receive), send)
            if len(body) > SMALL:
                await run_in_threadpool(release_memory)
        finally:
            turn.end()
            self.under_way -= 1
            self.bodies.release(client, len(body))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """First the body, then what really comes: a client's leaving."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return first.pop() if first else await receive()

    return again
