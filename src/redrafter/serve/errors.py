"""Errors in OpenAI's form, with the right status."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from redrafter.errors import ConfigError, PromptTooLong, RedrafterError
from redrafter.serve.scheduler import Draining, QueueFull

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


def content(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": _text(message), "type": kind, "param": param and _text(param), "code": code}}


def _text(given: str) -> str:
    """What a client sent may come back in a message, lone surrogates and all: those are no text."""
    return given.encode(errors="replace").decode()


def failure(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: int | None = None,
) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(content(status, message, param=param, code=code), status, headers)


class Refused(Exception):
    """A request that goes no further. What the client still sends is thrown away by the connection, for a while."""

    def __init__(self, status: int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.response = failure(status, message, **details)


def described(error: Exception) -> tuple[int, str, str | None]:
    """Status, message and code of what went wrong; of our own faults a client learns no more than that."""
    if isinstance(error, QueueFull):
        return 429, str(error), "queue_full"
    if isinstance(error, Draining):
        return 503, str(error), "draining"
    if isinstance(error, PromptTooLong):
        return 400, str(error), "context_length_exceeded"
    if isinstance(error, ConfigError):
        return 400, str(error), None
    if isinstance(error, RedrafterError):
        return 500, str(error), None
    return 500, f"the answer failed ({type(error).__name__})", "internal_error"


def parameter(message: str, names: Sequence[str]) -> str | None:
    """The first parameter that a message of ours speaks of.

    >>> parameter("logit_bias names token 7, outside the vocabulary", ["n", "logit_bias"])
    'logit_bias'
    """
    return next((word for word in re.findall(r"\w+", message) if word in names), None)


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message with the client's names of fields.

    >>> renamed("messages.0 is empty", {"messages": "input"})
    'input.0 is empty'
    """
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message)


def first_problem(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Message and parameter of what pydantic found: what we say ourselves, else the first of it."""
    error = next((e for e in errors if e["type"] == "not_supported"), errors[0])
    where = [str(part) for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', '')}", None
    param = error.get("ctx", {}).get("param") or (where[0] if where else None)
    if error["type"] == "not_supported":
        return error["msg"], param
    what = error["msg"].removeprefix("Value error, ")
    got = error.get("input")
    shown = "" if got is None or isinstance(got, dict | list) else f", got {str(got)[:80]!r}"
    if error["type"] == "missing":
        return f"{'.'.join(where) or 'the body'} is missing", param
    if error["type"] == "extra_forbidden":
        return f"there is no parameter {'.'.join(where)!r}", param
    return f"{'.'.join(where) + ': ' if where else ''}{what}{shown}", param
