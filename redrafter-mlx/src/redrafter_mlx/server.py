"""A thin OpenAI endpoint: chat and text completions, streamed or whole, one request at a time."""

import itertools
import json
import logging
import secrets
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import redrafter_mlx
from redrafter_mlx.config import SAMPLING, require
from redrafter_mlx.errors import ConfigError, RedrafterError

log = logging.getLogger(__name__)

MOST_BYTES = 2**24  # of a request
OPTIONS = (*SAMPLING, "seed", "stop")
KNOWN = ("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "user")


class Server(HTTPServer):
    """Requests are answered one after another, so a conversation can go on from what was read for the last one."""

    engine: Any

    def __init__(self, host: str, port: int) -> None:
        self.kept = redrafter_mlx.PromptCache()
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from error


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
        engine = self.server.engine
        try:
            body = self._body()
            prompt, options = read_request(body, chat)
            responses = engine.stream(prompt, prompt_cache=self.server.kept, **options)
            found = answers(engine.target.name, chat, body, responses)
            first = next(found)  # a wrong option is found before anything is sent
            if body.get("stream"):
                self._stream(itertools.chain([first], found))
            else:
                self._send(200, first)
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
        return {name: value for name, value in body.items() if value is not None}

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
        neutral = not value or (name in ("n", "best_of") and value == 1)
        require(name in OPTIONS or name in KNOWN or neutral, f"{name}={value!r} is not supported")
    require(isinstance(body.get("stream_options", {}), dict), "stream_options must be an object")
    prompt = body.get("messages" if chat else "prompt")
    require(bool(prompt), f"{'messages' if chat else 'prompt'} is missing or empty")
    messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    require(messages == chat, "messages are a list, each with a role and a content; a prompt is one text or token ids")
    options = {"temperature": 1.0} | {name: body[name] for name in OPTIONS if name in body}
    most = body.get("max_completion_tokens", body.get("max_tokens", 512))
    return prompt, options | {"max_new_tokens": most}


def answers(model: str, chat: bool, body: dict[str, Any], responses: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """A text in OpenAI's form: token by token if it is streamed, else at once."""
    stream = body.get("stream", False)
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    base = {"id": f"cmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
    text = ""
    for response in responses:
        text += response.text
        if (text and stream) or response.finish_reason:
            said = {"role": "assistant", "content": text}
            content = {"delta" if stream else "message": said} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": response.finish_reason, "logprobs": None} | content
            usage = {} if stream else {"usage": usage_of(response.stats)}
            yield base | {"choices": [choice]} | usage
            text = ""
    if body.get("stream_options", {}).get("include_usage"):
        yield base | {"choices": [], "usage": usage_of(response.stats)}


def usage_of(stats: Any) -> dict[str, Any]:
    written, read = stats.tokens, stats.prompt_tokens
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return counts | {"prompt_tokens_details": {"cached_tokens": stats.reused}}
