"""A thin OpenAI endpoint: chat and text completions, streamed or whole, one request at a time."""

import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from redrafter_mlx.config import SamplingParams, require
from redrafter_mlx.decode import Part, PromptCache
from redrafter_mlx.errors import ConfigError, RedrafterError

log = logging.getLogger(__name__)

MOST_BYTES = 2**24
"""Of a request."""
SAMPLING = tuple(f.name for f in fields(SamplingParams))
TEXT = (
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "model",
    "messages",
    "prompt",
)
NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "logprobs": (None, False),
    "echo": False,
    "tools": (None, []),
    "logit_bias": (None, {}),
}
"""Fields that are known and have no effect at these values; other values are refused by name."""


class Server(HTTPServer):
    """Requests are answered one after another, so a conversation can go on from what was read for the last one."""

    engine: Any
    kept: PromptCache


def make_server(host: str, port: int) -> Server:
    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from error
    server.kept = PromptCache()
    return server


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60  # seconds that a silent client may keep the others waiting

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/v1/models":
            name = self.server.engine.target.name
            self._send(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "redrafter-mlx"}]})
        else:
            self._fail(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            return self._fail(404, f"there is no {self.path}")
        try:
            body = self._body()
            prompt, options = read_request(body, chat)
            parts = self.server.engine.stream(prompt, prompt_cache=self.server.kept, **options)
            first = next(parts)  # a wrong option is found before anything is sent
            answer = Answer(self.server.engine, chat, first, parts)
            if body.get("stream"):
                usage = bool((body.get("stream_options") or {}).get("include_usage"))
                self._stream(answer.chunks(usage))
            else:
                self._send(200, answer.whole())
        except RedrafterError as error:
            self._fail(400, str(error))
        except (BrokenPipeError, ConnectionResetError):
            log.info("the client left")
        return None

    def _body(self) -> dict[str, Any]:
        size = self.headers.get("Content-Length", "")
        require(size.isdigit() and int(size) <= MOST_BYTES, f"a request needs a Content-Length of at most {MOST_BYTES}")
        try:
            body = json.loads(self.rfile.read(int(size)))
        except ValueError as error:
            raise ConfigError(f"the request is not JSON: {error}") from None
        require(isinstance(body, dict), "the request is no JSON object")
        return dict(body)

    def _stream(self, chunks: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})


def read_request(body: dict[str, Any], chat: bool) -> tuple[Any, dict[str, Any]]:
    """The prompt and the options of `Engine.stream`; raises ConfigError for what is not supported."""
    for name, value in body.items():
        if name in NEUTRAL:
            allowed = NEUTRAL[name] if isinstance(NEUTRAL[name], tuple) else (NEUTRAL[name], None)
            require(value in allowed, f"{name}={value!r} is not supported")  # type: ignore[operator]
        else:
            require(name in (*TEXT, *SAMPLING, "user"), f"the field {name!r} is not supported")
    prompt: Any = body.get("messages" if chat else "prompt")
    require(bool(prompt), f"{'messages' if chat else 'prompt'} is missing or empty")
    if chat:
        messages = isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)
        texts = [m.get("content") for m in prompt] if messages else [None]
        require(all(isinstance(text, str) for text in texts), "each message needs a role and a content that is a text")
    else:
        ids = isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)
        require(isinstance(prompt, str) or ids, "the prompt must be one text, or the token ids of one")
    options = {name: body[name] for name in (*SAMPLING, "seed", "stop") if body.get(name) is not None}
    require(isinstance(options.get("seed", 0), int), "seed must be a whole number")
    stops = options.get("stop", [])
    listed = isinstance(stops, list) and all(isinstance(s, str) for s in stops)
    require(isinstance(stops, str) or listed, "stop must be a text or a list of texts")
    require(isinstance(body.get("stream_options") or {}, dict), "stream_options must be an object")
    options.setdefault("temperature", 1.0)  # OpenAI's default
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    most = given[0] if given else 512
    require(isinstance(most, int), f"max_tokens must be a whole number, got {most!r}")
    return prompt, options | {"max_new_tokens": most}


class Answer:
    """One text in OpenAI's form."""

    def __init__(self, engine: Any, chat: bool, first: Part, rest: Iterator[Part]) -> None:
        self.chat, self.first, self.rest = chat, first, rest
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": engine.target.name,
        }

    def parts(self) -> Iterator[Part]:
        yield self.first
        yield from self.rest

    def usage(self, part: Part) -> dict[str, Any]:
        written, read = part.stats.tokens, part.stats.prompt_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": part.stats.reused},
        }

    def whole(self) -> dict[str, Any]:
        parts = list(self.parts())
        text = "".join(part.text for part in parts)
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, "finish_reason": parts[-1].finish_reason, "logprobs": None} | content
        return self.base | {"choices": [choice], "usage": self.usage(parts[-1])}

    def chunks(self, usage: bool) -> Iterator[dict[str, Any]]:
        kind = {"object": "chat.completion.chunk"} if self.chat else {}
        part = self.first
        for i, part in enumerate(self.parts()):
            role = {"role": "assistant"} if i == 0 else {}
            content = {"delta": role | {"content": part.text}} if self.chat else {"text": part.text}
            yield self.base | kind | {"choices": [{"index": 0, "finish_reason": part.finish_reason} | content]}
        if usage:
            yield self.base | kind | {"choices": [], "usage": self.usage(part)}
