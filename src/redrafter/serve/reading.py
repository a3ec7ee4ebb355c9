"""Bodies become values and are checked: large ones in a worker thread, so that other requests are heard meanwhile."""

import ctypes
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, WrapValidator
from starlette.concurrency import run_in_threadpool

from redrafter.serve.bodies import SMALL

Asked = TypeVar("Asked", bound=BaseModel)
T = TypeVar("T")
Given = Annotated[Asked, WrapValidator(lambda given, _: given)]
"""What a client gave, as JSON has it; the schema is that of the model."""


class Body(Request):
    async def json(self) -> Any:
        body = await self.body()
        return await _run(len(body), json.loads, body)


class ReadingRoute(APIRoute):
    """A route whose handler may await `checked`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Any:
            return await handle(Body(request.scope, request.receive))

        return handler


async def checked(kind: type[Asked], given: Any, request: Request) -> Asked:
    """Raises RequestValidationError."""

    def check() -> Asked:
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    return await _run(len(await request.body()), check)


async def _run(size: int, work: Callable[..., T], *arguments: Any) -> T:
    return await run_in_threadpool(work, *arguments) if size > SMALL else work(*arguments)


def release_memory() -> None:
    """Give freed memory back to the system, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
