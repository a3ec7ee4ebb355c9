"""A request id for every answer, and one line of JSON for every request."""

import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.errors import described, failure

log = logging.getLogger("redrafter.requests")

USABLE = re.compile(r"[\w.:-]{1,128}", re.ASCII)
"""Ids of clients that are taken over; others could break a log line."""

POLLED = ("/health", "/ready", "/metrics")
"""Monitors ask for these every few seconds; they get no line."""


class RequestLog:
    """ASGI middleware. The id is the client's header X-Request-Id, or a new one, and comes back in the same header."""

    def __init__(self, app: ASGIApp, logs: bool) -> None:
        self.app, self.logs = app, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        identity = given if USABLE.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        state = scope.setdefault("state", {})
        began, first, status = time.monotonic(), None, 499  # the client left before an answer began

        async def told(message: Message) -> None:
            nonlocal first, status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            elif first is None:
                first = time.monotonic() - began
            await send(message)

        try:
            await self.app(scope, receive, told)
        except Exception as error:
            if status != 499:  # the answer has begun: the connection ends without its end
                raise
            log.exception("request %s failed", identity)
            code, message, name = described(error)
            await failure(code, message, code=name)(scope, receive, told)
        finally:
            if self.logs and scope["path"] not in POLLED:
                log.info(line(identity, scope, status, time.monotonic() - began, first, state.get("usage")))


def line(identity: str, scope: Scope, status: int, seconds: float, first: float | None, usage: Any) -> str:
    told: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": identity,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
        "first_byte_seconds": None if first is None else round(first, 4),
    }
    if usage is not None:
        counts = usage()
        told |= {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
        told["tokens_per_step"] = counts["speculative"]["tokens_per_step"]
    return json.dumps(told)
