"""A published drafter's conventions are measured: the reading it was trained with is found, others are not believed."""

import logging

import pytest
import torch

import redrafter
from benchmarks.tiny_drafters import LAYERS, TINY
from redrafter import Shape
from redrafter.cli.main import main
from redrafter.errors import UnsupportedDrafter
from redrafter.interop import conventions, published
from redrafter.interop.readings import Published
from redrafter.targets import load_target, verdicts
from tests.helpers.published import LEARNED, NAME, train_published
from tests.helpers.zoo import PROMPTS, make_model


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32, num_hidden_layers=LAYERS, layer_types=None))


@pytest.fixture(scope="module")
def checkpoint(target, tmp_path_factory):
    """The folder of a drafter that learned to run in one of the ways that its files leave open."""
    return train_published(target, tmp_path_factory.mktemp("before"), tmp_path_factory.mktemp("trained"))


def test_the_reading_that_was_learned_is_found(target, checkpoint, caplog):
    verdicts.forget()
    with caplog.at_level(logging.INFO, "redrafter.interop.conventions"):
        engine = redrafter.load(target.model, drafter=str(checkpoint), shape=Shape(width=3, length=3))
    for name, value in LEARNED.items():
        assert getattr(engine.drafter.net.config, name) == value, name
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert "hidden states 2, 4, 5, normed residual, normed recycled state" in line
    done = engine.generate(PROMPTS, max_new_tokens=16)
    assert [c.tokens for c in done] == [c.tokens for c in engine.plain().generate(PROMPTS, max_new_tokens=16)]
    assert sum(c.stats.accepted for c in done) > 0


def test_the_verdict_is_kept(target, checkpoint, monkeypatch):
    first = redrafter.load(target.model, drafter=str(checkpoint))
    monkeypatch.setattr(conventions, "_agreement", lambda *_: pytest.fail("measured again"))
    again = redrafter.load(target.model, drafter=str(checkpoint))
    assert again.drafter.net.config == first.drafter.net.config
    assert again.drafter.about == first.drafter.about
    verdicts.forget()
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        redrafter.load(target.model, drafter=str(checkpoint))


@pytest.mark.parametrize(
    "verdict",
    [
        ["x"],
        "x",
        3,
        {},
        {"reading": ["x"]},
        {"reading": "BEST", "right": 1, "likely": 1},
        {"reading": "BEST", "right": []},
    ],
    ids=str,
)
def test_a_file_that_is_no_verdict_is_measured_again(target, checkpoint, verdict, monkeypatch):
    found = published.read(checkpoint, target)
    if isinstance(verdict, dict) and verdict.get("reading") == "BEST":
        verdict = verdict | {"reading": found.readings[0].label}
    verdicts.forget()
    conventions.choose(found, target)
    [path] = [path for path in verdicts.kept() if "reading" in path.read_text()]
    verdicts.write(path, verdict)
    monkeypatch.setattr(conventions, "_agreement", lambda *_: pytest.fail("measured again"))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        conventions.choose(found, target)


def test_a_choice_on_a_text_that_repeats_itself_is_not_kept(target, checkpoint, monkeypatch, caplog):
    verdicts.forget()
    monkeypatch.setattr(conventions, "_written", lambda _: ([1, 2, 3] + [4] * 40, 3))
    conventions.choose(published.read(checkpoint, target), target)
    assert "repeats itself" in caplog.text
    assert not any("reading" in path.read_text() for path in verdicts.kept())


def test_a_context_without_room_for_a_text_is_refused(target, checkpoint, monkeypatch):
    verdicts.forget()
    found = published.read(checkpoint, target)
    monkeypatch.setattr(target, "max_positions", 8 + conventions.DEPTH)
    with pytest.raises(UnsupportedDrafter, match="its context of 11 tokens leaves no room") as caught:
        conventions.choose(found, target)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(target, "max_positions", 8 + conventions.DEPTH + 1)
    text, first = conventions._written(target)
    assert len(text) - first > conventions.DEPTH


def test_twin_a_wrong_reading_alone_guesses_worse(target, checkpoint):
    found = published.read(checkpoint, target)
    text, first = conventions._written(target)
    scores = {}
    for reading in found.readings:
        drafter = conventions.bind_own(found.net, target)
        scores[reading.label] = conventions._agreement(drafter, reading.config, target, text, first).likely
    best = "hidden states 2, 4, 5, normed residual, normed recycled state"
    assert max(scores, key=scores.get) == best
    assert scores["hidden states 2, 4, 5, plain residual, plain recycled state"] < 0.7 * scores[best]


def test_a_drafter_that_knows_nothing_is_refused(target, tmp_path):
    TINY[NAME]().write(tmp_path)
    with pytest.raises(UnsupportedDrafter, match="guessing the most frequent one") as caught:
        redrafter.load(target.model, drafter=str(tmp_path))
    assert str(caught.value).count("hidden states") == 8, "it says what it tried"
    assert "\n" not in str(caught.value)


def test_a_weak_drafter_is_named(target, checkpoint, caplog):
    found = published.read(checkpoint, target)
    weak = Published(found.format, found.net, found.readings, usual=1.01)
    verdicts.forget()
    conventions.choose(weak, target)
    assert "it may have been made for another version" in caplog.text


def test_doctor_says_what_it_is(target, checkpoint, tmp_path, capsys):
    target.model.save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--drafter", f"{checkpoint}+ngram", "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "EAGLE-3 in the layout of NVIDIA: hidden states 2, 4, 5, normed residual" in out
    assert "guesses among 24 of 40 tokens" in out
