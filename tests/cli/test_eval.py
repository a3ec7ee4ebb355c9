"""Measuring drafters: sums with known answers, and drafters of known skill."""

import gzip
import json

import pytest

from redrafter import Engine, Shape
from redrafter.cli.main import main
from redrafter.drafters import NoDrafter
from redrafter.engine.request import Completion, Stats
from redrafter.errors import ConfigError
from redrafter.questions import read_questions
from redrafter.targets import load_target
from redrafter.train.evaluate import count, evaluate
from tests.helpers.zoo import PROMPTS, OracleDrafter, make_model

SHAPE = Shape(width=1, length=3)


def answer(accepted: list[int], nodes: int = 0) -> Completion:
    tokens = 1 + sum(a + 1 for a in accepted)
    stats = Stats("seeded", True, len(accepted), tokens, sum(accepted), nodes, accepted)
    return Completion("", [0] * tokens, "length", 0, stats)


def test_known_sums():
    """Two categories: 3 + 1 + 0 accepted in three steps, and 2 + 2 in two."""
    answers = [answer([3, 1, 0], nodes=9), answer([2, 2], nodes=4)]
    first, second, whole = count(answers, ["a", "b"], SHAPE, 0.0)
    assert (first.category, first.steps, first.tokens_per_step) == ("a", 3, pytest.approx(7 / 3))
    assert first.acceptance == [pytest.approx(2 / 3), pytest.approx(1 / 2), 1.0]
    assert second.acceptance == [1.0, 1.0, 0.0]
    assert (whole.category, whole.answers, whole.steps) == ("all", 2, 5)
    assert whole.tokens_per_step == pytest.approx(13 / 5), "token-weighted, not the mean of the two"
    assert whole.acceptance == [pytest.approx(4 / 5), pytest.approx(3 / 4), pytest.approx(1 / 3)]
    assert whole.nodes_per_step == pytest.approx(13 / 5)


def test_depths_that_were_never_reached_have_no_rate():
    [got] = count([answer([0, 0])], ["a"], SHAPE, 0.0)
    assert got.acceptance == [0.0, None, None]


def test_one_category_is_not_told_twice():
    assert [g.category for g in count([answer([1])], ["a"], SHAPE, 0.0)] == ["a"]


def test_drafters_of_known_skill():
    target = load_target(make_model())
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=21)]
    for skill, expected in ((1.0, 1.0), (0.0, 0.0)):
        engine = Engine(target, OracleDrafter(PROMPTS, plain, skill))
        requests = engine.requests(PROMPTS, max_new_tokens=21)
        heard = []
        [got] = evaluate(engine, requests, ["a"] * 5, [Shape(width=1, length=4)], 5, heard.append)
        assert got.acceptance[0] == expected
        assert got.tokens_per_step == (5.0 if expected else 1.0)
        assert heard == [5]


def test_questions_of_every_form(tmp_path):
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["one", "two"]},
        {"prompt": "three"},
        {"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "four"}]},
    ]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "q.jsonl").write_text(text)
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as file:
        file.write(text)
    for name in ("q.jsonl", "q.jsonl.gz"):
        found = read_questions(tmp_path / name)
        assert [(q.text, q.category) for q in found] == [
            ("one", "writing"),
            ("three", "uncategorised"),
            ("four", "uncategorised"),
        ]
    assert [q.text for q in read_questions(tmp_path / "q.jsonl", 2)] == ["one", "three"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no questions"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n[]', "line 2"),
        ('{"turns": []}', "line 1: turns must have a length of at least 1"),
        ('{"turns": [1, 2]}', r"line 1: turns\[0\] must be text, got 1"),
        ('{"turns": "text"}', "line 1: turns must be a list, got 'text'"),
        ('{"turns": ["\\ud800"]}', "must be UTF-8 text"),
        ('{"prompt": null}', "must be text, got None"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "must be text, got 3"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_bad_question_files(tmp_path, content, says):
    (tmp_path / "q.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_questions(tmp_path / "q.jsonl")
    with pytest.raises(ConfigError, match="cannot read the questions"):
        read_questions(tmp_path / "none.jsonl")


def test_command(capsys, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"turns": ["Say: a b a b a b"], "category": "x"}\n{"turns": ["Count."], "category": "y"}\n')
    save = tmp_path / "out.json"
    shapes = ["--shapes", "1x2", "2x3:4", "--temperatures", "0", "1", "--max-new-tokens", "8"]
    assert main(["eval", "--questions", str(questions), *shapes, "--save", str(save)]) == 0
    assert "tokens/step" in capsys.readouterr().out
    result = json.loads(save.read_text())
    assert len(result["rows"]) == 2 * 2 * 3
    assert set(result["headline"]) == {"1x2:2, T=0", "2x3:4, T=0", "1x2:2, T=1", "2x3:4, T=1"}
    for row in result["rows"]:
        assert row["tokens_per_step"] == pytest.approx((row["tokens"] - row["answers"]) / row["steps"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--shapes", "4"], "WxL"), (["--shapes", "0x3"], "width must be"), (["--limit", "0"], "--limit must be")],
)
def test_bad_arguments(capsys, tmp_path, arguments, says):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    assert main(["eval", "--questions", str(questions), *arguments]) == 2
    assert says in capsys.readouterr().err
