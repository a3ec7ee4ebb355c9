"""Rough company: clients that leave, dawdle, shout or talk nonsense; the server answers clearly and lives on."""

import concurrent.futures
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from redrafter.serve.model import Served
from redrafter.serve.scheduler import Scheduler
from tests.helpers.serving import NAME, SLOW, make_served, plain, running, wait_until

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served(rows=6)


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with running(served, body_bytes=20_000, body_seconds=0.7) as address:
        yield address


@pytest.fixture(autouse=True)
def _alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server answers, and no row is left behind."""
    yield
    if "url" in request.fixturenames:
        status, answer = post(request.getfixturevalue("url"), {"model": NAME, "prompt": "a", "max_tokens": 3})
        assert (status, len(answer["choices"])) == (200, 1)
        pool = request.getfixturevalue("served").scheduler.batch
        assert wait_until(lambda: pool.free == pool.rows)
        assert pool.used == 0


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)


def post(url: str, body: Any, path: str = PATH, **headers: str) -> tuple[int, Any]:
    connection = connect(url)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "stop": "b"},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "stop": ["ab", "Ka"]},
    {"temperature": 0.7, "logit_bias": {"3": 2.0}, "speculative": False},
    {"temperature": 1.2, "n": 2},
    {"temperature": 0.5, "logprobs": 2},
]


def talk(url: str, body: dict[str, Any], leaves: float | None) -> list[str] | None:
    """Texts of the answer; None for a client that left after so many seconds."""
    connection = connect(url)
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    if leaves is not None:
        time.sleep(leaves)
        connection.close()
        return None
    response = connection.getresponse()
    assert response.status == 200
    if not body.get("stream"):
        choices = json.loads(response.read())["choices"]
        connection.close()
        return [c["text"] for c in choices]
    texts = [""] * body.get("n", 1)
    for line in response:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    connection.close()
    return texts


def test_64_clients_at_once_some_of_whom_leave(url: str, served: Served) -> None:
    chance = random.Random(2)
    bodies, leaves = [], []
    for i in range(64):
        prompt = ("abcdefghijklmnopqrst" if i % 2 else "") + "".join(
            chance.choices("abcdefgh", k=chance.randint(1, 25))
        )
        own = {"model": NAME, "prompt": prompt, "max_tokens": chance.randint(1, 25), "seed": i}
        bodies.append(own | KINDS[i % len(KINDS)] | {"stream": chance.random() < 0.5})
        leaves.append(chance.random() * 1.5 if chance.random() < 0.25 else None)
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        texts = list(threads.map(lambda pair: talk(url, *pair), zip(bodies, leaves, strict=True)))
    assert sum(t is not None for t in texts) > 40
    alone = plain(served)
    for body, text in zip(bodies, texts, strict=True):
        if text is None:
            continue
        ours = ("model", "prompt", "max_tokens", "stream", "logprobs", "speculative", "logit_bias")
        options = {k: v for k, v in body.items() if k not in ours}
        options["logit_bias"] = {int(k): v for k, v in body.get("logit_bias", {}).items()}
        done = alone.generate([body["prompt"]], max_new_tokens=body["max_tokens"], **options)
        assert text == [c.text for c in done], body


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(url: str, served: Served, stream: bool) -> None:
    before = served.scheduler.metrics.finished["cancelled"]
    connection = connect(url)
    body = {"model": NAME, "prompt": "a", "stream": stream, **SLOW, "n": 6}
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    assert wait_until(lambda: served.scheduler.jobs)
    if connection.sock is not None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert wait_until(lambda: served.scheduler.metrics.finished["cancelled"] > before)
    assert wait_until(lambda: served.scheduler.idle)


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        (b"", 400, "the body is missing"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, ""),
        (b"\xff\xfe", 400, ""),
        (b"null", 400, ""),
        (b'{"model": "letters", "prompt": "a", "temperature": NaN}', 400, "finite number"),
        (b'{"model": "letters", "prompt": "a", "temperature": 1e999}', 400, ""),
        (b'{"model": "letters", "prompt": "\\ud800"}', 400, ""),
        (b'{"model": "\\ud800", "prompt": "a"}', 404, "no model"),
        (b'{"model": "letters", "prompt": "a", "\\ud800": 1}', 400, "unicode"),
        (b'{"model": "letters", "prompt": ""}', 400, "empty"),
        (b'{"model": "letters", "prompt": []}', 400, ""),
        (b'{"model": "letters", "prompt": [-1]}', 400, ""),
        (b'{"model": "letters", "prompt": [999999]}', 400, "outside the vocabulary"),
        (b'{"model": "letters", "prompt": [1e400]}', 400, ""),
        (b'{"model": "letters", "prompt": [99999999999999999999999]}', 400, ""),
        (b'{"model": "letters", "prompt": "a", "seed": 99999999999999999999999}', 400, ""),
        (b'{"model": "letters", "prompt": "a", "max_tokens": "many"}', 400, "max_tokens"),
        (b'{"model": "letters", "prompt": "a", "stop": ["", "x"]}', 400, "stop"),
        (b'{"model": "letters", "prompt": "a", "n": 17}', 400, "n"),
        (b'{"model": 7, "prompt": "a"}', 400, "model"),
        (b'{"prompt": "a"}', 400, "model is missing"),
        (b"[" * 10_000, 400, ""),
        (b'{"model": "letters", "prompt": "' + b"a" * 30_000 + b'"}', 413, "longer than 20000"),
    ],
    ids=lambda x: x[:24].decode(errors="replace") if isinstance(x, bytes) else None,
)
def test_nonsense_gets_a_clear_answer(url: str, body: bytes, status: int, what: str) -> None:
    for path in (PATH, "/v1/chat/completions") if b"prompt" not in body else (PATH,):
        got, answer = post(url, body, path)
        assert got == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert what in answer["error"]["message"]


def raw(url: str, *pieces: bytes, wait: float = 0.0) -> bytes:
    """Bytes as they are; what comes back."""
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(wait)
        answer = b""
        while data := sock.recv(65536):
            answer += data
            if b"\r\n\r\n" in answer and (b"close" in answer or answer.endswith(b"}}")):
                break
        return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_that_never_ends_is_cut_off(url: str) -> None:
    chunks = [b"2710\r\n" + b" " * 10_000 + b"\r\n"] * 3
    answer = raw(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunks)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_client_that_dawdles_is_sent_away(url: str) -> None:
    began = time.monotonic()
    answer = raw(url, HEAD + b"Content-Length: 100\r\n\r\n", b'{"model"', wait=0.1)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 5


def test_what_is_no_http_at_all(url: str) -> None:
    assert raw(url, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_slow_reader_stalls_nobody(url: str, served: Served) -> None:
    host, port = urlsplit(url).netloc.split(":")
    body = json.dumps({"model": NAME, "prompt": "a", "stream": True, "trace": True, **SLOW}).encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        before = served.scheduler.metrics.finished["length"]
        status, _ = post(url, {"model": NAME, "prompt": "b", **SLOW, "max_tokens": 30})
        assert status == 200
        assert wait_until(lambda: served.scheduler.metrics.finished["length"] >= before + 2), "its row is free"


def test_other_paths_and_methods(url: str) -> None:
    connection = connect(url)
    for method, path, status in (("GET", "/nowhere", 404), ("GET", PATH, 405), ("DELETE", "/v1/models", 405)):
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == status
        assert "error" in json.loads(response.read())
    connection.close()


def test_health_and_metrics(url: str, served: Served) -> None:
    post(url, {"model": NAME, "prompt": "abc", "max_tokens": 20, "temperature": 1.0, "seed": 1})
    connection = connect(url)
    found = {}
    for path in ("/health", "/ready", "/metrics"):
        connection.request("GET", path)
        response = connection.getresponse()
        found[path] = response.read().decode()
        assert response.status == 200
    values = dict(line.rsplit(" ", 1) for line in found["/metrics"].splitlines() if not line.startswith("#"))
    for name in ("requests_total", "tokens_total", "time_to_first_token_seconds_count", "tokens_per_step"):
        assert float(values[f"redrafter_{name}"]) > 0, name
    for name in ("queue_length", "running_rows", "cache_slots_used"):
        assert f"redrafter_{name}" in values
    assert 0 <= float(values['redrafter_acceptance{depth="1"}']) <= 1
    assert float(values["redrafter_time_per_token_seconds_count"]) > 10
    assert int(values["redrafter_cache_slots"]) == served.scheduler.batch.rows * 90
    connection.request("GET", "/")
    page = connection.getresponse()
    assert b"redrafter" in page.read()
    assert "default-src 'none'" in (page.getheader("Content-Security-Policy") or "")
    connection.close()


@pytest.mark.parametrize("examples", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_schemathesis_finds_no_server_error(url: str, examples: int) -> None:
    """Whatever the schema allows, and what it does not, of every operation."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: set[int] = set()

    operations = [made.ok() for made in schema.get_all_operations()]
    assert {o.path for o in operations} >= {PATH, "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"}
    for operation in operations:

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def one(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = NAME
            response = case.call()
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text

        one()
    assert {200, 400} <= statuses


def test_ending_finishes_what_runs() -> None:
    served = make_served()
    with running(served) as url:
        connection = connect(url)
        body = {"model": NAME, "prompt": "a", **SLOW}
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        assert wait_until(lambda: served.scheduler.jobs)
        answers: list[int] = []
        waiting = threading.Thread(target=lambda: answers.append(connection.getresponse().status))
        waiting.start()
    waiting.join(10)
    connection.close()
    assert answers == [200]


def test_ending_without_patience_fails_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    served = make_served()
    turn = Scheduler.turn
    monkeypatch.setattr(Scheduler, "turn", lambda self: (time.sleep(0.2), turn(self))[1])
    answers: list[Any] = []
    with running(served, grace=0.0) as url:

        def client(stream: bool) -> None:
            connection = connect(url)
            body = {"model": NAME, "prompt": "a", **SLOW, "stream": stream}
            connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answers.append((response.status, response.read()))
            connection.close()

        threads = [threading.Thread(target=client, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(served.scheduler.jobs) == 2)
    for thread in threads:
        thread.join(10)
    assert sorted(status for status, _ in answers) == [200, 503]
    assert all(b"shut down before the answer was finished" in text for _, text in answers)
