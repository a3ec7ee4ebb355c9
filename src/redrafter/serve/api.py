"""The HTTP face: OpenAI's chat and text completions, models, health, metrics, and the page. It knows no tensors."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from redrafter.errors import RedrafterError
from redrafter.serve.answer import Answer
from redrafter.serve.chat import ChatAnswer
from redrafter.serve.completion import TextAnswer
from redrafter.serve.config import GuardConfig
from redrafter.serve.errors import content, described, failure, first_problem, parameter, renamed
from redrafter.serve.job import Event, Job
from redrafter.serve.middleware import Guard
from redrafter.serve.model import Served
from redrafter.serve.reading import Given, ReadingRoute, checked
from redrafter.serve.request_log import RequestLog
from redrafter.serve.responses import ResponsesAnswer
from redrafter.serve.responses_schema import CHAT_NAMES, ResponsesAsked
from redrafter.serve.schema import ChatAsked, CompletionAsked, DetokenizeAsked, Failed, TokenizeAsked
from redrafter.serve.turns import Turn
from redrafter.version import __version__

PAGE = "page.html"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'"
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Failed, "description": what}
    for status, what in {
        400: "a parameter is wrong; `param` names it",
        401: "missing or wrong API key",
        403: "the server does not go by the name in the header Host",
        404: "no such model",
        408: "the body came too slowly",
        413: "the body is too long",
        415: "the body is not declared as JSON",
        422: "the body is not what the schema says",
        429: "the queue is full; see Retry-After",
        500: "the answer failed",
        503: "the server is shutting down, or too much is under way; see Retry-After",
    }.items()
}
KEYED: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (401, 403)}


def make_app(served: Served, guard: GuardConfig | None = None) -> FastAPI:
    """The application; its scheduler runs from startup to shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.scheduler.start()
        yield
        await run_in_threadpool(served.scheduler.stop, 0.0)

    app = FastAPI(title="redrafter", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    guard = guard or GuardConfig()
    most = 4 * (served.scheduler.batch.rows + served.scheduler.limits.queue) + 64
    app.router.route_class = ReadingRoute
    app.add_middleware(Guard, config=guard, most=most)
    app.add_middleware(RequestLog, logs=guard.logs)
    if guard.cors:  # the outermost: a browser asks without a key first
        app.add_middleware(CORSMiddleware, allow_origins=guard.cors, allow_methods=["*"], allow_headers=["*"])
    _handle_errors(app)
    _add_watching(app, served)

    @app.post("/v1/chat/completions", responses=REFUSALS)
    async def chat(given: Given[ChatAsked], request: Request) -> Response:
        return await _answer(served, await checked(ChatAsked, given, request), request)

    @app.post("/v1/completions", responses=REFUSALS)
    async def completions(given: Given[CompletionAsked], request: Request) -> Response:
        return await _answer(served, await checked(CompletionAsked, given, request), request)

    @app.post("/v1/responses", responses=REFUSALS)
    async def responses(given: Given[ResponsesAsked], request: Request) -> Response:
        asked = await checked(ResponsesAsked, given, request)
        try:
            chat = await run_in_threadpool(asked.chat)
        except ValidationError as error:
            message, param = first_problem(error.errors())
            return failure(400, renamed(message, CHAT_NAMES), param=CHAT_NAMES.get(param or "", param))
        return await _answer(served, chat, request, lambda jobs: ResponsesAnswer(asked, chat, jobs, served), CHAT_NAMES)

    @app.post("/tokenize", responses=REFUSALS)
    async def tokenize(given: Given[TokenizeAsked], request: Request) -> Any:
        asked = await checked(TokenizeAsked, given, request)
        if asked.model not in (None, served.name):
            return _no_model(served, str(asked.model))
        return await run_in_threadpool(served.tokenize, asked)

    @app.post("/detokenize", responses=REFUSALS)
    async def detokenize(given: Given[DetokenizeAsked], request: Request) -> Any:
        asked = await checked(DetokenizeAsked, given, request)
        if asked.model not in (None, served.name):
            return _no_model(served, str(asked.model))
        return {"prompt": await run_in_threadpool(served.prompts.decode, asked.tokens)}

    @app.get("/tokenizer_info", responses=KEYED)
    async def tokenizer_info() -> dict[str, Any]:
        return served.tokenizer_info()

    @app.get("/v1/models", responses=KEYED)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}", responses=KEYED | {s: REFUSALS[s] for s in (404, 422)})
    async def model(name: str) -> Any:
        return _model(served) if name == served.name else _no_model(served, name)

    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        message, param = first_problem(error.errors())
        return failure(400, message, param=param)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        answer = failure(error.status_code, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RedrafterError)
    @app.exception_handler(Exception)
    async def ours(_: Request, error: Exception) -> Response:
        status, message, code = described(error)
        return failure(status, message, code=code)


def _add_watching(app: FastAPI, served: Served) -> None:
    scheduler = served.scheduler

    def works() -> bool:
        return scheduler.thread is not None and scheduler.thread.is_alive()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = resources.files("redrafter.serve").joinpath(PAGE).read_text()
        return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"})

    @app.get("/health", responses={s: REFUSALS[s] for s in (403, 503)})
    async def health() -> Any:
        """Is the process worth keeping?"""
        return {"status": "ok"} if works() else failure(503, "the scheduler has stopped")

    @app.get("/ready", responses={s: REFUSALS[s] for s in (403, 503)})
    async def ready() -> Any:
        """Should new requests come here?"""
        if not works() or scheduler.draining:
            return failure(503, "the server is shutting down", code="draining")
        return {"status": "ready", "model": served.name, "rows": scheduler.batch.rows, "context": served.context}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        batch = scheduler.batch
        lines = scheduler.metrics.lines(
            waiting=scheduler.waiting,
            running=len(scheduler.jobs),
            rows=batch.rows,
            slots_used=batch.used,
            slots=batch.rows * batch.context,
            state_copies=batch.prefixes.nbytes,
            exactness=served.promise.exactness,
        )
        return "\n".join(lines) + "\n"


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "redrafter",
        "max_model_len": served.context,
        "exactness": served.promise.exactness,
    }


def _no_model(served: Served, name: str) -> JSONResponse:
    message = f"there is no model {name[:80]!r} here; this server has {served.name!r}"
    return failure(404, message, param="model", code="model_not_found")


async def _answer(
    served: Served,
    asked: ChatAsked | CompletionAsked,
    request: Request,
    make: Callable[[list[Job]], Answer] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """`make` makes the answer if it is not that of the path; `names` are what clients call some fields."""
    if asked.model != served.name:
        return _no_model(served, asked.model)
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def listener(index: int, event: Event) -> None:
        loop.call_soon_threadsafe(heard.put_nowait, (index, event))

    def prepare() -> Answer:
        jobs = served.jobs(asked, listener, owner_of(request))
        return make_answer(asked, jobs, served) if make is None else make(jobs)

    turn: Turn = request.state.turn
    try:
        if asked.compiles:
            await turn.begin()
        answer = await run_in_threadpool(prepare)
        turn.end()
        served.scheduler.submit(answer.jobs)
    except Exception as error:
        status, message, code = described(error)
        retry = served.scheduler.retry_after() if status in (429, 503) else None
        param = parameter(message, ["prompt", *type(asked).model_fields]) if status == 400 else None
        if param == "prompt" and isinstance(asked, ChatAsked):
            param = "messages"
        param = names.get(param, param) if param is not None else None
        return failure(status, renamed(message, names), param=param, code=code, retry_after=retry)
    request.state.usage = answer.usage
    if asked.stream:
        chunks = _stream(served, answer, heard, asked.stream_options.include_usage)
        return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return await _whole(served, answer, heard, request)


def owner_of(request: Request) -> str:
    """Who asks: a hash of the key, since a key may be long."""
    return hashlib.sha256(request.headers.get("authorization", "").encode()).hexdigest()


def make_answer(asked: ChatAsked | CompletionAsked, jobs: list[Job], served: Served) -> Answer:
    if isinstance(asked, ChatAsked):
        parsers = [served.chat.parser(asked) for _ in jobs]
        return ChatAnswer(jobs, served.name, served.text_of, parsers, trace=asked.trace)
    echoes = None
    if asked.echo:
        texts = [p if isinstance(p, str) else served.prompts.decode(p) for p in asked.prompts]
        echoes = [text for text in texts for _ in range(asked.written)]
    return TextAnswer(asked, jobs, served.name, served.text_of, echoes)


async def _stream(
    served: Served, answer: Answer, heard: "asyncio.Queue[tuple[int, Event]]", usage: bool
) -> AsyncIterator[str]:
    """Server-sent events. Whoever stops listening is cancelled."""
    try:
        for chunk in answer.opening():
            yield answer.sent(chunk | {"usage": None} if usage else chunk)
        while answer.open:
            index, event = await heard.get()
            if event.error is not None:
                status, message, code = described(event.error)
                yield answer.sent(content(status, message, code=code))
                return
            answer.take(index, event)
            long = event.output is not None and event.output.prompt_logprobs is not None
            chunks = await run_in_threadpool(answer.chunks, index, event) if long else answer.chunks(index, event)
            for chunk in chunks:
                yield answer.sent(chunk | {"usage": None} if usage else chunk)
        for chunk in answer.closing(usage):
            yield answer.sent(chunk)
        yield answer.ending
    finally:
        _cancel(served, answer.jobs)


async def _whole(
    served: Served, answer: Answer, heard: "asyncio.Queue[tuple[int, Event]]", request: Request
) -> Response:
    gone = asyncio.ensure_future(_left(request))
    try:
        while answer.open:
            told_first = asyncio.ensure_future(heard.get())
            await asyncio.wait([told_first, gone], return_when=asyncio.FIRST_COMPLETED)
            if not told_first.done():
                told_first.cancel()
                return Response(status_code=499)  # to nobody
            index, event = told_first.result()
            if event.error is not None:
                status, message, code = described(event.error)
                return failure(status, message, code=code, retry_after=1 if status == 503 else None)
            answer.take(index, event)
        return await run_in_threadpool(lambda: JSONResponse(answer.whole()))
    finally:
        gone.cancel()
        _cancel(served, answer.jobs)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(served: Served, jobs: Sequence[Job]) -> None:
    """What is finished is not touched by it."""
    if any(not job.finished for job in jobs):
        served.scheduler.cancel(jobs)
