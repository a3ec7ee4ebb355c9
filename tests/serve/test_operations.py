"""Running a server: ids and logs, other origins, shutdown, clients that leave the queue."""

import http.client
import json
import logging
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from redrafter.serve.config import GuardConfig
from redrafter.serve.scheduler import Scheduler
from redrafter.serve.server import Server
from tests.helpers.serving import NAME, SLOW, make_served, running, wait_until

PATH = "/v1/completions"


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)


def post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = connect(url)
    given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request("POST", PATH, json.dumps({"model": NAME, "prompt": "a"} | body), given)
    response = connection.getresponse()
    text = json.loads(response.read())
    connection.close()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, text


def test_ids_logs_and_other_origins(caplog: pytest.LogCaptureFixture) -> None:
    served = make_served()
    on = {"logs": True, "cors": ("http://page.example",), "api_key": "k"}
    with caplog.at_level(logging.INFO, "redrafter.requests"), running(served, **on) as url:
        _, headers, _ = post(url, {"max_tokens": 5, "ignore_eos": True}, X_Request_Id="abc-1", Authorization="Bearer k")
        assert headers["x-request-id"] == "abc-1"
        for odd in ("a b", "x" * 200, '"', "é"):
            status, headers, _ = post(url, {"max_tokens": 5}, X_Request_Id=odd)
            assert status == 401
            assert headers["x-request-id"].startswith("req-")
        _, headers, _ = post(url, {"max_tokens": 2}, Origin="http://page.example", Authorization="Bearer k")
        assert headers["access-control-allow-origin"] == "http://page.example"
        connection = connect(url)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
            connection.request("OPTIONS", PATH, headers=asked | {"Origin": origin})
            response = connection.getresponse()
            response.read()
            assert (response.status == 200) == allowed
        connection.close()
    lines = [json.loads(r.message) for r in caplog.records if r.name == "redrafter.requests"]
    first = lines[0]
    assert (first["request_id"], first["status"], first["path"], first["completion_tokens"]) == ("abc-1", 200, PATH, 5)
    assert 0 < first["first_byte_seconds"] <= first["seconds"]
    assert [line["status"] for line in lines[1:5]] == [401] * 4
    assert not any(line["path"] == "/health" for line in lines)


def test_a_fault_of_ours_is_answered_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_served()

    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr("redrafter.serve.api._no_model", broken)
    on = {"logs": True, "cors": ("http://page.example",)}
    with caplog.at_level(logging.INFO, "redrafter.requests"), running(served, **on) as url:
        status, headers, answer = post(url, {"model": "x"}, Origin="http://page.example", X_Request_Id="abc-2")
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer["error"]["message"]
    assert headers["x-request-id"] == "abc-2"
    assert headers["access-control-allow-origin"] == "http://page.example"
    lines = [json.loads(r.message) for r in caplog.records if r.message.startswith("{")]
    assert [(line["status"], line["request_id"]) for line in lines] == [(500, "abc-2")]


def test_a_draining_server_answers_503(monkeypatch: pytest.MonkeyPatch) -> None:
    served, turn = make_served(), Scheduler.turn
    monkeypatch.setattr(Scheduler, "turn", lambda self: (time.sleep(0.05), turn(self))[1])
    server = Server(served, GuardConfig(), "127.0.0.1", 0, 20.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert wait_until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(post(url, SLOW)[0]))
    waiting.start()
    assert wait_until(lambda: served.scheduler.jobs)
    server.handle_exit(15, None)
    status, headers, answer = post(url, {"max_tokens": 2})
    assert (status, answer["error"]["code"]) == (503, "draining")
    assert int(headers["retry-after"]) >= 1
    waiting.join(20)
    thread.join(20)
    assert answers == [200]
    assert not thread.is_alive()


def test_a_second_signal_ends_the_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served, turn = make_served(), Scheduler.turn
    monkeypatch.setattr(Scheduler, "turn", lambda self: (time.sleep(0.5), turn(self))[1])
    server = Server(served, GuardConfig(), "127.0.0.1", 0, 60.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert wait_until(lambda: server.started)
    connection = connect(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    body = {"model": NAME, "prompt": "a", **SLOW, "speculative": False}
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    assert wait_until(lambda: served.scheduler.jobs)
    server.handle_exit(15, None)
    time.sleep(0.2)
    assert thread.is_alive(), "the answer may finish"
    server.handle_exit(15, None)
    thread.join(3)
    assert not thread.is_alive()
    assert wait_until(lambda: served.scheduler.thread is None or not served.scheduler.thread.is_alive(), 3)
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_makes_room_at_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served, turn, gate = make_served(rows=1, queue=1), Scheduler.turn, threading.Event()
    monkeypatch.setattr(Scheduler, "turn", lambda self: (gate.wait(20), turn(self))[1])
    with running(served) as url:
        connections = []
        for _ in range(2):
            connections.append(connect(url))
            body = {"model": NAME, "prompt": "a", "stream": stream, **SLOW}
            connections[-1].request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        try:
            assert wait_until(lambda: served.scheduler.waiting == 2), "the scheduler is in the middle of a turn"
            sock = connections[1].sock
            assert sock is not None
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connections[1].close()
            assert wait_until(lambda: served.scheduler.waiting == 1)
        finally:
            gate.set()
        connections[0].close()
