"""Clients that open connections and say nothing, or not all; names by which a browser reaches the server."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from redrafter.serve import connection
from redrafter.serve.bodies import SMALL
from redrafter.serve.connection import Connection
from redrafter.serve.middleware import Guard
from redrafter.serve.model import Served
from tests.helpers.serving import NAME, SLOW, make_served, running, wait_until

PATH = "/v1/completions"
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
NO_BODY = BEGUN + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served()


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with running(served) as address:
        yield address


def ask(url: str, method: str = "POST", path: str = PATH, **headers: str) -> tuple[int, Any, http.client.HTTPResponse]:
    talk = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 2}) if method == "POST" else None
    talk.request(method, path, body, {"Content-Type": "application/json"} | headers)
    response = talk.getresponse()
    text = response.read().decode()
    talk.close()
    return response.status, json.loads(text) if text.startswith("{") else text, response


def opened(url: str, sent: bytes = b"") -> socket.socket:
    host, port = urlsplit(url).netloc.split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.sendall(sent)
    return client


def closed_within(client: socket.socket, seconds: float) -> bool:
    client.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            while client.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("sent", [b"", b"G", BEGUN], ids=["nothing", "a byte", "half of the headers"])
def test_headers_have_a_time_limit(url: str, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 0.3)
    with opened(url, sent) as client:
        assert closed_within(client, 5)


def test_bytes_one_by_one_are_no_headers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are those of a second request."""
    monkeypatch.setattr(Connection, "header_seconds", 0.5)
    for first in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        began = time.monotonic()
        with opened(url, first) as client, contextlib.suppress(ConnectionError):
            while time.monotonic() < began + 5:
                client.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() < began + 5


def test_a_slow_answer_is_waited_for(url: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are about what the client sends, and about the time before it sends again."""
    monkeypatch.setattr(Connection, "header_seconds", 0.2)
    turn = served.scheduler.turn
    monkeypatch.setattr(served.scheduler, "turn", lambda: (time.sleep(0.1), turn())[1])
    body = json.dumps({"model": NAME, "prompt": "a", **SLOW, "max_tokens": 8, "speculative": False})
    talk = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    for _ in range(2):
        talk.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = talk.getresponse()
        assert (response.status, len(json.loads(response.read())["choices"])) == (200, 1)
        time.sleep(0.5)  # between requests, a connection may rest
    talk.close()


@pytest.mark.parametrize("sent", [b"", BEGUN, NO_BODY], ids=["nothing", "half of the headers", "no body"])
def test_silent_connections_shut_nobody_out(url: str, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """More of them than the requests that may be under way, and before any time limit ends one."""
    monkeypatch.setattr(Connection, "header_seconds", 60)  # longer than a client waits
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(opened(url, sent)) for _ in range(500)]
        for path in ("/health", "/ready", "/metrics"):
            assert ask(url, "GET", path)[0] == 200
        assert ask(url)[0] == 200
        assert closed_within(silent[0], 10), "the oldest gave way"
        assert not closed_within(silent[-1], 0.1)


def test_who_speaks_is_not_the_one_to_go(url: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is being written outlives any number of silent connections."""
    monkeypatch.setattr(connection, "MOST_SILENT", 5)
    turn = served.scheduler.turn
    monkeypatch.setattr(served.scheduler, "turn", lambda: (time.sleep(0.05), turn())[1])
    body = json.dumps({"model": NAME, "prompt": "a", **SLOW, "max_tokens": 8}).encode()
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with opened(url, BEGUN + head + body) as client, contextlib.ExitStack() as stack:
        assert wait_until(lambda: served.scheduler.jobs)
        for _ in range(20):
            stack.enter_context(opened(url))
        assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("wait", [0.0, 0.2], ids=["before the answer", "after it"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_body_may_become_no_http(capfd: pytest.CaptureFixture[str], kind: str, wait: float) -> None:
    head = BEGUN + f"Content-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    wrong = b"zz\r\n"
    with running(make_served()) as url:
        with opened(url, head if wait else head + wrong) as client:
            time.sleep(wait)
            with contextlib.suppress(ConnectionError):
                client.sendall(wrong)
            assert client.recv(65536).startswith(b"HTTP/1.1 4")
            assert closed_within(client, 5)
        assert ask(url)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_who_does_not_read_is_sent_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "stalled_seconds", 0.3)
    ids = json.dumps({"tokens": [1] * 200_000}).encode()
    head = (
        f"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(ids)}\r\n\r\n"
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    host, port = urlsplit(url).netloc.split(":")
    client.connect((host, int(port)))
    began = time.monotonic()
    with client, contextlib.suppress(ConnectionError):
        while time.monotonic() < began + 5:  # answers fill the buffers of both sides
            client.sendall(head.encode() + ids)
            time.sleep(0.05)
    assert time.monotonic() < began + 5


@contextlib.contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch, **guard: Any) -> Iterator[tuple[str, Guard]]:
    """A server and its guard."""
    guards: list[Guard] = []
    call = Guard.__call__

    async def watched(self: Guard, *args: Any) -> None:
        guards[:] = [self]
        await call(self, *args)

    monkeypatch.setattr(Guard, "__call__", watched)
    with running(make_served(), **guard) as url:
        assert ask(url)[0] == 200
        yield url, guards[0]


def test_requests_under_way_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is not counted, and the limit ends with the requests."""
    with guarded(monkeypatch) as (url, guard):
        guard.most = 0
        status, answer, response = ask(url)
        assert (status, answer["error"]["code"], response.getheader("retry-after")) == (503, "busy", "1")
        assert ask(url, "GET", "/health")[0] == ask(url, "GET", "/ready")[0] == 200
        guard.most = 1
        assert ask(url)[0] == 200
        assert wait_until(lambda: not guard.under_way)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("127.1.2.3", 200),
        ("[::1]:8000", 200),
        ("box.example:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example:127.0.0.1", 403),
        ("", 403),
        ("10.0.0.1", 403),
    ],
)
def test_names_of_the_server(host: str, status: int) -> None:
    with running(make_served(), hosts=("box.example",)) as url:
        for method, path in (("POST", PATH), ("GET", "/"), ("GET", "/metrics"), ("GET", "/health")):
            found, answer, _ = ask(url, method, path, Host=host)
            assert found == status
            if status == 403:
                assert answer["error"]["code"] == "unknown_host"
                assert "--allow-host" in answer["error"]["message"]


def test_any_name_where_none_is_given(url: str) -> None:
    assert ask(url, Host="evil.example")[0] == 200


def test_no_other_page_shows_the_page_in_a_frame(url: str) -> None:
    assert "frame-ancestors 'none'" in (ask(url, "GET", "/")[2].getheader("Content-Security-Policy") or "")


def test_large_bodies_share_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client has half of it; small bodies are always taken; what is only declared takes nothing."""
    size = 4 * SMALL  # the room is 8 of these
    head = BEGUN + f"Content-Type: application/json\r\nContent-Length: {size}\r\n".encode()

    def status_of(client: socket.socket) -> int:
        return int(client.recv(65536).split()[1])

    with guarded(monkeypatch, body_bytes=size) as (url, guard), contextlib.ExitStack() as stack:
        declared = [stack.enter_context(opened(url, head + b"\r\n")) for _ in range(20)]
        begun = [stack.enter_context(opened(url, head + b"\r\n" + b" " * (size - 1))) for _ in range(5)]
        assert wait_until(lambda: guard.bodies.held == {"127.0.0.1": 5 * (size - 1 - SMALL)})
        refused = [stack.enter_context(opened(url, head + b"\r\n" + b" " * (size - 1))) for _ in range(2)]
        for client in refused:
            answer = client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer.lower()
        assert ask(url)[0] == 200, "a small one"
        for client in begun:
            client.sendall(b" ")
            assert status_of(client) == 400, "its turn came, and it is no JSON"
        for client in declared[:3]:
            client.sendall(b" " * size)
            assert status_of(client) == 400, "there is room again"
        assert wait_until(lambda: not guard.bodies.held)
