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

from redrafter import Engine, Shape
from redrafter.cli.main import main
from redrafter.cli.serve import measured
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.planning.copying import MOST_COPIED
from redrafter.serve import measuring
from redrafter.serve.batches import CPU_LADDER, first_shape, ladder, make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.measuring import Measuring, stored_profile
from redrafter.serve.server import Server
from redrafter.tuning import batch_cost, store
from redrafter.tuning.chooser import ShapeChooser
from redrafter.tuning.profile import BestShape, Profile, StepCost
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


def test_only_a_server_that_drafts_measures_what_steps_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path)
    target, asked = make_target(), SimpleNamespace(width=None, length=None, nodes=None, tune="once")
    config = ServeConfig(rows=1, context=90, name="toy")
    plain = Engine(target, NoDrafter())
    assert measured(plain, config, asked).scheduler.spare is None  # type: ignore[arg-type]
    drafting = Engine(target, recurrent_drafter(target))
    assert measured(drafting, config, asked).scheduler.spare is not None  # type: ignore[arg-type]


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "profile_folder", lambda: tmp_path)
    target = make_target()
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=2, length=2))
    monkeypatch.setattr(batch_cost, "TEXTS", 3)
    monkeypatch.setattr(batch_cost, "TEXT_TOKENS", 12)
    shapes = ladder(engine)
    assert len(shapes) == len(CPU_LADDER)
    batch = make_batch(engine, ServeConfig(rows=3, context=90), shapes)
    chooser = ShapeChooser(None, first_shape(engine, batch, shapes))
    assert stored_profile(engine, batch, "once") is None
    Measuring(engine, batch, shapes, chooser)(lambda: None, lambda: None)
    first = stored_profile(engine, batch, "once")
    assert first == chooser.profile
    assert first is not None
    assert batch.free == 3
    assert {cost.rows for cost in first.step_costs} == {1, 2, 3} == {best.rows for best in first.best_shapes}
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert stored_profile(engine, batch, "again") is None
    assert all(chooser.choose(rows) in (*shapes, None) for rows in range(1, 9))
    other = make_batch(engine, ServeConfig(rows=2, context=90), shapes)
    with pytest.raises(ConfigError, match="there is no measurement yet"):
        stored_profile(engine, other, "never")


def test_a_server_on_a_cpu_measures_nothing_and_chooses_as_generate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a shape is given: then every step drafts."""
    target, made = make_target(), []
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    monkeypatch.setattr(Server, "run", lambda self: made.append(self.served))
    words = ["serve", "--port", "0", "--model", str(tmp_path / "toy"), "--drafter", "ngram", "--rows", "2"]
    words += ["--dtype", "fp64"]
    assert main([*words, "--tune", "never"]) == 0
    assert main([*words, "--length", "3", "--width", "1"]) == 0
    (adapting, fixed) = (served.scheduler for served in made)
    assert adapting.policy is not None
    assert adapting.spare is None
    assert adapting.batch.slack > MOST_COPIED
    assert fixed.policy is None
    assert fixed.costs.choose(1) == Shape(width=1, length=3)
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


def test_a_tuned_profile_with_larger_trees_than_there_is_room_for_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_target()
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=2, length=2))
    batch = make_batch(engine, ServeConfig(rows=1, context=90), ladder(engine))

    def tuned(shape: Shape) -> Profile:
        step_costs = (StepCost(rows=1, shape=shape, ms=1.0), StepCost(rows=1, shape=None, ms=1.0))
        best_shapes = (BestShape(rows=1, shape=None),)
        return Profile(key={}, target_name="x", temperature=0.0, step_costs=step_costs, best_shapes=best_shapes)

    monkeypatch.setattr(measuring, "read_profile", lambda *_: None)
    monkeypatch.setattr(measuring, "find_profile", lambda *_: tuned(Shape(width=4, length=4)))
    found = stored_profile(engine, batch, "never")
    assert found is not None
    assert found.target_name == "x"
    for large in (Shape(width=4, length=5), Shape(width=5, length=4, nodes=7)):  # the beam search visits 20 nodes
        monkeypatch.setattr(measuring, "find_profile", lambda *_, large=large: tuned(large))
        with pytest.raises(ConfigError, match="there is no measurement yet"):
            stored_profile(engine, batch, "never")
