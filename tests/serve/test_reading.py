"""Where bodies become values: small ones in the event loop, large ones beside it."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, field_validator

from redrafter.serve.bodies import SMALL
from redrafter.serve.reading import Body, checked


class Seen(BaseModel):
    text: str

    @field_validator("text")
    @classmethod
    def _remember(cls, text: str) -> str:
        WHERE.append(threading.get_ident())
        return text


WHERE: list[int] = []


def request_of(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Body({"type": "http", "headers": []}, receive)


@pytest.mark.parametrize(("size", "beside"), [(10, False), (SMALL + 1, True)])
def test_large_bodies_are_read_and_checked_beside_the_loop(monkeypatch, size, beside):
    def loads(body: bytes) -> Any:
        WHERE.append(threading.get_ident())
        return json.loads(body)

    monkeypatch.setattr("redrafter.serve.reading.json", SimpleNamespace(loads=loads))
    WHERE.clear()
    request = request_of(json.dumps({"text": "a" * size}).encode())

    async def read() -> Seen:
        return await checked(Seen, await request.json(), request)

    assert asyncio.run(read()).text == "a" * size
    assert [where != threading.get_ident() for where in WHERE] == [beside] * 2


@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_what_is_wrong_is_said_as_ever(size):
    request = request_of(b" " * size)
    with pytest.raises(RequestValidationError) as refused:
        asyncio.run(checked(Seen, {"text": 1}, request))
    assert refused.value.errors()[0]["loc"] == ("text",)
