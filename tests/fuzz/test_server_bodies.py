"""Hostile bodies on every route of the server: each is answered or refused in one line."""

import copy
import gzip
import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.bytes import byte_target
from tests.helpers.serving import NAME, make_served, running, wait_until

CASES = 500
"""For each route."""
SECONDS = 10.0
MODEL, SHORT = {"model": NAME}, {"max_output_tokens": 4}
PARTS = [{"type": "text", "text": "b"}]
TALK = [
    {"role": "user", "content": "name"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": PARTS},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}}
FUNCTION = {"name": "look", "description": "d", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "name"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "c"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "c"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
SAMPLED = MODEL | {"temperature": 0.5, "top_p": 0.9, "seed": 1, "max_tokens": 4, "stop": ["z"], "n": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NAMED = {"type": "function", "function": {"name": "look"}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        SAMPLED | {"prompt": "name", "logprobs": 2, "echo": True, "logit_bias": {"5": 1.0}},
        SAMPLED | STREAM | {"prompt": [[1, 2], "a"], "top_k": 3, "min_p": 0.1},
        SAMPLED | {"prompt": "a", "guided_json": PARAMETERS, "repetition_penalty": 1.1},
        SAMPLED | {"prompt": [1, 2], "guided_regex": "[ab]+", "best_of": 3, "presence_penalty": 0.1},
        SAMPLED | {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "prompt_logprobs": 1},
        SAMPLED | {"prompt": "a", "guided_grammar": 'start: "a" /[bc]{2}/', "metadata": {"a": "b"}},
    ],
    "/v1/chat/completions": [
        SAMPLED | {"messages": TALK, "logprobs": True, "top_logprobs": 2},
        SAMPLED | STREAM | {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", "trace": True},
        SAMPLED | {"messages": TALK, "tools": [TOOL], "tool_choice": NAMED},
        SAMPLED | {"messages": TALK, "response_format": FORMAT},
        SAMPLED | {"messages": TALK[:2], "continue_final_message": True, "add_generation_prompt": False},
        SAMPLED | {"messages": CALLED},
    ],
    "/v1/responses": [
        MODEL | SHORT | {"input": "name", "instructions": "i", "metadata": {"a": "b"}},
        MODEL | SHORT | {"input": ITEMS, "stream": True},
        MODEL | SHORT | {"input": "a", "tools": [FUNCTION | {"type": "function"}], "tool_choice": "required"},
        MODEL | SHORT | {"input": "a", "text": {"format": FORMAT["json_schema"] | {"type": "json_schema"}}},
    ],
    "/tokenize": [{"prompt": "name", "return_token_strs": True}, {"messages": TALK, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
"""Bodies that are answered, by route."""
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 17, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "a", "\0", "\ud800", "é" * 300, "\u202e", "ab" * 200_000, "[INST] <|im_start|> </s>", "{{ 1/0 }}",
    "(", "(a{999}){999}", "start: start", [], [[]], [None], [1, -1, ""], ["a"] * 30_000, [2**70], {}, {"": None},
    {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"multipleOf": 1e-300}, {"pattern": "("},
    {str(i): i for i in range(5000)},
]  # fmt: skip
HEADERS: list[dict[str, str]] = [
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    {"Content-Type": "application/json", "Transfer-Encoding": "gibberish"},
    {"Content-Type": "application/json", "Expect": "100-continue"},
    {"Content-Type": "application/json", "Authorization": "Bearer " + "k" * 9000},
    {"Content-Type": "application/json", "X-Request-Id": "a" * 500},
    {"Content-Type": "application/json", "Accept": "\xff", "Upgrade": "websocket", "Connection": "upgrade"},
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def nested(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((50, 90, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def changed(body: dict[str, Any], names: list[str], rng: random.Random) -> bytes:
    """The body with a few other values, fields more and fields less."""
    value = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        if not (every := list(places(value))):
            break
        inside, key = rng.choice(every)
        match rng.randrange(8):
            case 0 | 1 | 2:
                inside[key] = copy.deepcopy(rng.choice(VALUES))
            case 3 | 4:
                value[rng.choice(names)] = copy.deepcopy(rng.choice(VALUES))
            case 5:
                inside.pop(key)
            case 6:
                inside[key] = nested(rng)
            case 7 if isinstance(inside, dict):
                inside[rng.choice(names)] = copy.deepcopy(inside[key])
    text = json.dumps(value)
    if rng.random() < 0.1:  # a field twice
        text = text.replace("{", f'{{"{rng.choice(names)}": {json.dumps(rng.choice(VALUES))}, ', 1)
    return text.encode()


def broken(data: bytes, rng: random.Random) -> bytes:
    """No JSON any more, or other JSON."""
    at = rng.randrange(len(data))
    match rng.randrange(9):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        case 2:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 3:
            return data.decode(errors="replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
        case 4:
            return gzip.compress(data)
        case 5:
            return b"[" * rng.choice((1, 500, 30_000, 200_000))
        case 6:
            return rng.choice(
                (b"", b"null", b"1", b'"a"', b"[]", b"{}", b"NaN", b"{" * 900, b'{"a":' * 20_000, b"1" * 9000)
            )
        case 7:
            return data.replace(b'"', b'"\\ud800', rng.randint(1, 9))
        case _:
            return data + data


def sent(url: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    talk = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    try:
        talk.request(method, path, body, headers)
        response = talk.getresponse()
        return response.status, response.read()
    except ConnectionError:  # the server reads no more of a request whose headers are wrong
        if headers in HEADERS:
            return 0, b""
        raise
    finally:
        talk.close()


def sent_raw(url: str, data: bytes) -> tuple[int, bytes]:
    """The first answer. Status 0: the server closed the connection."""
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
        answer = b""
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while got := client.recv(65536):
                answer += got
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
    status = answer.split(b" ", 2)[1] if answer.startswith(b"HTTP/1.1 ") else b"0"
    return int(status), answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 ")[0]


def request_of(path: str, body: bytes, rng: random.Random) -> bytes:
    """A request whose framing is wrong."""
    length = rng.choice(
        (str(len(body)), "0", "-1", "1e3", "99999999999999999999", str(len(body) + 9), "5, 5", "\u0664")
    )
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    if rng.random() < 0.4:
        lines.insert(2, "Transfer-Encoding: chunked")
        sizes = ("5", "fffffffffffffffff", "-1", "zz", "")
        body = rng.choice(sizes).encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"
    if rng.random() < 0.3:
        lines[rng.randrange(len(lines))] = rng.choice(("", "a", ": b", "Host", "GET", "x" * 70_000, "A: \0"))
    data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return broken(data, rng) if rng.random() < 0.3 else data


def wrong(status: int, answer: bytes) -> str | None:
    """What is wrong with an answer, if anything is."""
    if status >= 500:
        return f"status {status}"
    if b"internal_error" in answer or b"Traceback" in answer:
        return "the answer failed"
    if status >= 400 and answer.startswith(b"{"):
        message = json.loads(answer)["error"]["message"]
        if "\n" in message or len(message) > 2000:
            return f"an error that is no line: {message[:200]!r}"
    return None


@pytest.mark.fuzz
def test_server_bodies(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    rng, ends, failed, slowest = random.Random(4), Counter[str](), list[str](), 0.0
    served = make_served(byte_target(), context=600)
    with running(served, body_bytes=2**20) as url:
        routes = json.loads(sent(url, "GET", "/openapi.json", b"", {})[1])["paths"]
        assert set(BODIES) == {path for path, methods in routes.items() if "post" in methods}
        asked = json.dumps(BODIES["/v1/completions"][0]).encode()
        kind = {"Content-Type": "application/json"}
        for path, bodies in BODIES.items():
            for body in bodies:
                status, answer = sent(url, "POST", path, json.dumps(body).encode(), kind)
                assert status == 200, answer
        first = json.loads(sent(url, "POST", "/v1/completions", asked, kind)[1])["choices"]
        for path in routes:
            bodies = BODIES.get(path, BODIES["/v1/completions"])
            names = sorted({name for body in bodies for name in body})
            for case in range(CASES):
                began = time.monotonic()
                data = changed(rng.choice(bodies), names, rng)
                headers, method = kind, "POST" if path in BODIES else "GET"
                if case % 4 == 1:
                    data = broken(data, rng)
                if case % 16 == 2:
                    headers = rng.choice(HEADERS)
                if case % 16 == 3:
                    method = rng.choice(("PUT", "PATCH", "DELETE", "GET", "OPTIONS", "HEAD"))
                try:
                    if case % 16 == 4:
                        status, answer = sent_raw(url, request_of(path, data, rng))
                    else:
                        status, answer = sent(url, method, path, data, headers)
                    problem = wrong(status, answer)
                except Exception as error:
                    status, problem = -1, repr(error)
                seconds = time.monotonic() - began
                slowest = max(slowest, seconds)
                ends["answered" if 0 < status < 400 else "refused" if status >= 0 else "failed"] += 1
                if problem or seconds > SECONDS:
                    failed.append(f"{path} case {case}: {problem}, {seconds:.1f} s: {data[:300]!r}")
        assert wait_until(lambda: not served.scheduler.jobs)
        assert json.loads(sent(url, "POST", "/v1/completions", asked, kind)[1])["choices"] == first
    errors = capfd.readouterr().err + caplog.text
    with capfd.disabled():
        print(f"\n{sum(ends.values())} bodies: {dict(ends)}; slowest {slowest:.1f} s")
    assert not failed, "\n".join(failed[:20])
    assert "Traceback" not in errors, errors[errors.index("Traceback") :][:9000]
    assert ends["answered"] > 100
    assert ends["refused"] > CASES
