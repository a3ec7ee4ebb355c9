"""`redrafter serve` as a user starts and ends it."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redrafter import Engine, RuleConfig, Shape
from redrafter.cli.main import main
from redrafter.drafters import NoDrafter
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.late_steps import LateSteps
from redrafter.planning.steps import FixedSteps, PlannedSteps
from redrafter.serve.config import ServeConfig
from redrafter.serve.server import Server, build_planned
from tests.helpers.letters import make_target
from tests.helpers.scheduling import jobs_of, run
from tests.helpers.zoo import recurrent_drafter


def test_it_starts_answers_and_ends(tmp_path: Path) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    options = [
        "--drafter",
        "ngram",
        "--width",
        "1",
        "--length",
        "3",
        "--dtype",
        "fp64",
        "--rows",
        "2",
        "--context",
        "90",
    ]
    command = [sys.executable, "-u", "-m", "redrafter.cli.main", "serve", "--port", "0", "--allow-host", "box.example"]
    with subprocess.Popen(
        [*command, "--model", str(tmp_path / "toy"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            found = next(m for line in server.stdout if (m := re.search(r"page (http://127.0.0.1:\d+)/", line)))
            body = {"model": "toy", "prompt": "hello", "max_tokens": 9, "temperature": 0}
            asked = urllib.request.Request(
                f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=20) as answer:
                done = json.loads(answer.read())
            assert (
                done["choices"][0]["text"]
                == Engine(target, recurrent_drafter(target)).plain().generate("hello", max_new_tokens=9).text
            )
            for host, accepted in (("box.example", True), ("evil.example", False)):
                health = urllib.request.Request(f"{found[1]}/health", headers={"Host": host})
                with pytest.raises(urllib.error.HTTPError, match="403") if not accepted else contextlib.nullcontext():
                    urllib.request.urlopen(health, timeout=20).close()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
    assert server.returncode in (0, 130)


@pytest.mark.parametrize("rule", ["seeded", "rejection", "typical"])
def test_every_rule_is_served(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    served: list[Any] = []
    monkeypatch.setattr(
        "redrafter.serve.server.Server", lambda model, *_: SimpleNamespace(run=lambda: served.append(model))
    )
    options = ["--drafter", "ngram", "--width", "1", "--length", "3", "--rows", "2", "--max-model-len", "90"]
    assert main(["serve", "--port", "0", "--model", str(tmp_path / "toy"), *options, "--rule", rule]) == 0
    assert served[0].engine.rule_config.name == rule
    assert served[0].context == 90
    assert "warning" not in capsys.readouterr().err
    if rule == "seeded":
        assert main(["serve", "--host", "0.0.0.0", "--port", "0", "--model", str(tmp_path / "toy"), *options]) == 0
        assert "--api-key asks for a key" in capsys.readouterr().err


def test_what_cannot_be_served_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, what in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--rows", "0"], "rows must be at least 1"),
            (["--api-key", ""], "the API key is empty"),
            (["--allow-host", "http://box"], "--allow-host takes a name without scheme and path, got 'http://box'"),
        ):
            assert main(["serve", *options]) == 2
            assert what in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "redrafter.serve.server", raising=False)
    assert main(["serve", "--rows", "2"]) == 2
    assert "uvicorn is missing: pip install fastapi uvicorn" in capsys.readouterr().err


def test_too_many_rows_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    target = make_target()
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    monkeypatch.setattr("redrafter.serve.server.make_batch", full)
    assert main(["serve", "--port", "0", "--model", str(tmp_path / "toy"), "--drafter", "ngram"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("use fewer --rows or a smaller --context")
    assert "Traceback" not in said


def test_a_server_on_a_cpu_plans_as_generate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a shape is given: then every step drafts."""
    target, made = make_target(), []
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    monkeypatch.setattr(Server, "run", lambda self: made.append(self.served))
    words = ["serve", "--port", "0", "--model", str(tmp_path / "toy"), "--drafter", "ngram", "--rows", "2"]
    words += ["--dtype", "fp64"]
    assert main(words) == 0
    assert main([*words, "--length", "3", "--width", "1"]) == 0
    (adapting, fixed) = (served.scheduler for served in made)
    assert isinstance(adapting.policy, PlannedSteps)
    assert adapting.batch.slack > MOST_COPIED
    assert isinstance(fixed.policy, FixedSteps)
    assert fixed.policy.shape == Shape(width=1, length=3)
    plain = Engine(target, NoDrafter())
    requests = plain.requests([[3, 4, 5] * 8, [7, 8]], max_new_tokens=30, ignore_eos=True)
    heard = []
    for request in requests:
        ((job, told),) = jobs_of(target, [request])
        adapting.submit([job])
        heard.append(told)
    run(adapting)
    assert [told.tokens for told in heard] == [done.tokens for done in plain.complete(requests)]
    assert not adapting.policy.planner.rows


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_a_server_plans_under_rules_whose_texts_depend_on_the_tree(rule: str) -> None:
    """Each row then has the nodes of the beam."""
    target = make_target()
    engine = Engine(target, recurrent_drafter(target), rule=RuleConfig(name=rule))
    scheduler = build_planned(engine, ServeConfig(rows=2, context=90, name="toy")).scheduler
    assert isinstance(scheduler.policy, LateSteps)
    listeners = []
    for request in engine.requests([[3, 4, 5], [7, 8]], max_new_tokens=40, temperature=1.0, ignore_eos=True):
        ((job, told),) = jobs_of(target, [request], rule=engine.rule_config)
        scheduler.submit([job])
        listeners.append(told)
    run(scheduler)
    assert [len(told.tokens) for told in listeners] == [40, 40]
    assert any(":" in name for name in scheduler.metrics.steps), "some steps drafted"
    assert scheduler.metrics.expected > 0
    assert scheduler.policy.planner.costs.known
