"""`redrafter bench` as a user types it."""

import json

import pytest

from redrafter.cli.main import main

ASKED = '{"question_id": 1, "category": "x", "turns": ["Say a word.", "And another."]}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nowhere"], "no suite 'nowhere'"),
        (["--suite", "mt_bench", "--contenders", "lookahead"], "no contender 'lookahead'"),
        (["--suite", "mt_bench", "--shapes", "big"], "big"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("redrafter.targets.load_target", lambda *a, **k: pytest.fail("loaded"))
    assert main(["bench", "run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_and_its_page(tmp_path, capsys):
    """The default model and its drafter; then the same command finds everything done."""
    file = tmp_path / "asked.jsonl"
    file.write_text(ASKED + ASKED.replace("1", "2"))
    run = ["bench", "run", "--suite", str(file), "--quick", "--max-new-tokens", "4", "--contenders", "recurrent"]
    run += ["--out", str(tmp_path / "run")]
    assert main([*run, "--save", str(tmp_path / "a.json")]) == 0
    lines = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2
    assert all(json.loads(line)["equal"] for line in lines)
    assert main(run) == 0
    assert (tmp_path / "run" / "answers.jsonl").read_text().splitlines() == lines
    assert main(["bench", "report", str(tmp_path / "run"), "--save", str(tmp_path / "b.json")]) == 0
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    a, b = (json.loads((tmp_path / name).read_text())["headline"] for name in ("a.json", "b.json"))
    assert a == b
    assert set(a) == {"recurrent_speedup", "recurrent_tokens_per_step"}
