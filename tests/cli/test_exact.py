"""Commands show the exactness, and `--exact require` refuses to run without it."""

import json

import pytest
import torch

from redrafter.cli import bench_run, compare
from redrafter.cli.console import Console
from redrafter.cli.main import main
from redrafter.engine.ties import Difference
from redrafter.targets import load_target
from tests.helpers.letters import make_target
from tests.helpers.promises import promise_bitwise
from tests.helpers.zoo import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("exact") / "toy"
    target = make_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def options(model) -> list[str]:
    return ["--model", model, "--drafter", "ngram", "--device", "cpu", "--dtype", "fp32"]


SHORT = ["--max-new-tokens", "6", "--raw", "--ignore-eos"]


def commands(tmp_path) -> dict[str, list[str]]:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["abc"]}) + "\n")
    return {
        "generate": [*SHORT, "abcabc"],
        "compare": [*SHORT, "abcabc"],
        "serve": ["--port", "0", "--width", "1", "--length", "2"],
        "eval": ["--questions", str(suite)],
    }


@pytest.mark.parametrize("verb", ["generate", "compare", "serve", "eval"])
def test_require_refuses_in_one_line(capsys, tmp_path, options, verb):
    assert main([verb, *options, "--exact", "require", *commands(tmp_path)[verb]]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("redrafter: exactness bitwise is required, but on a CPU the last bits of logits depend on")


def test_bench_run_refuses_too(capsys, tmp_path, model):
    suite = commands(tmp_path)["eval"][1]
    out = ["--out", str(tmp_path / "out"), "--contenders", "ngram"]
    assert main(["bench", "run", "--suite", suite, "--model", model, "--exact", "require", *out]) == 2
    assert "exactness bitwise is required" in capsys.readouterr().err


def test_require_runs_where_it_holds(capsys, monkeypatch, options):
    promise_bitwise(monkeypatch)
    assert main(["generate", *options, "--exact", "require", *SHORT, "abcabc"]) == 0
    assert "exactness bitwise" in capsys.readouterr().err


@pytest.mark.parametrize("bitwise", [True, False])
def test_generate_says_it(capsys, monkeypatch, options, bitwise):
    if bitwise:
        promise_bitwise(monkeypatch)
    assert main(["generate", *options, *SHORT, "abcabc"]) == 0
    assert f"exactness {'bitwise' if bitwise else 'ties'}" in capsys.readouterr().err
    assert main(["generate", *options, "--rule", "typical", *SHORT, "abcabc"]) == 0
    assert "exactness" not in capsys.readouterr().err, "this rule promises no tokens"


@pytest.mark.parametrize("bitwise", [True, False])
def test_doctor_says_it(capsys, monkeypatch, tmp_path, bitwise):
    if bitwise:
        promise_bitwise(monkeypatch)
    load_target(make_model(dtype=torch.float32)).model.save_pretrained(tmp_path / "model")
    assert main(["doctor", "--model", str(tmp_path / "model"), "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"exactness rule seeded: {'bitwise' if bitwise else 'ties'}: text equals plain decoding" in out
    assert ("except at ties" in out) != bitwise


@pytest.mark.parametrize("bitwise", [True, False])
def test_compare_says_it_next_to_the_equality(capsys, monkeypatch, tmp_path, options, bitwise):
    if bitwise:
        promise_bitwise(monkeypatch)
    file = tmp_path / "out.json"
    assert main(["compare", *options, "--save", str(file), *SHORT, "abcabc"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    rest = "; exactness bitwise" if bitwise else ", 0 differ at a numerical tie; exactness ties"
    assert f"1 of 1 texts equal{rest}" in out
    assert json.loads(file.read_text())["rows"][0]["exactness"] == ("bitwise" if bitwise else "ties")


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_tie_is_an_error_where_the_promise_is_bitwise(capsys, monkeypatch, tmp_path, options, bitwise):
    """Also the twin of a comparison that ignores the promise: the same difference is a tie without it."""
    file = tmp_path / "out.json"
    command = ["compare", *options, "--save", str(file), *SHORT, "abcabc"]
    monkeypatch.setattr("redrafter.engine.ties.explain", lambda *a: Difference(3, 0.0, 0.25))
    monkeypatch.setattr(compare, "Console", lambda **k: Console(force_terminal=True, width=200, **k))
    if not bitwise:
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "tie at 3" in out
        assert "1 differ at a numerical tie" in out
        assert json.loads(file.read_text())["headline"]["equal"] == 1.0
        return
    promise_bitwise(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        main(command)
    out = capsys.readouterr().out
    assert "DIFFERS at 3" in out
    assert "\x1b[31mERROR: 1 of 1 texts differ although the exactness is bitwise" in out
    assert "numerical tie" not in out
    headline = json.loads(file.read_text())["headline"]
    assert (headline["equal"], headline["ties"]) == (0.0, 0)


def test_bench_run_passes_it_on(monkeypatch, tmp_path, model, capsys):
    promise_bitwise(monkeypatch)
    suite = commands(tmp_path)["eval"][1]
    seen = []
    whole = bench_run.reference_engine
    monkeypatch.setattr(bench_run, "reference_engine", lambda c: (seen.append(whole(c).exact), whole(c))[1])
    out = ["--out", str(tmp_path / "out"), "--contenders", "ngram", "--max-new-tokens", "4"]
    assert main(["bench", "run", "--suite", suite, "--model", model, "--exact", "require", *out]) == 0
    assert seen == ["require"]
