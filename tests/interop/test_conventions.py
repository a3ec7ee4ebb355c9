"""A published drafter's conventions are measured: the reading it was trained with is found, others are not believed."""

import logging

import pytest
import torch
import torch.nn.functional as F

import redrafter
from benchmarks.tiny_drafters import LAYERS, TINY
from redrafter import Shape
from redrafter.cli.main import main
from redrafter.drafters.eagle.loss import training_features
from redrafter.drafters.training import LossInput
from redrafter.errors import UnsupportedDrafter
from redrafter.interop import conventions, eagle3, published
from redrafter.interop.readings import Published
from redrafter.targets import load_target, verdicts
from redrafter.texts import Texts
from redrafter.train.batches import make_batch
from tests.helpers.zoo import PROMPTS, make_model

NAME = "EAGLE-3, NVIDIA"
"""The format that leaves the most unsaid."""
LEARNED = {"layers": (2, 4, 5), "residual": "normed", "recycled": "normed"}


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32, num_hidden_layers=LAYERS, layer_types=None))


@pytest.fixture(scope="module")
def checkpoint(target, tmp_path_factory):
    """The folder of a drafter that learned to run in one of the ways that its files leave open."""
    tiny = TINY[NAME]()
    learned = published.read(tiny.write(tmp_path_factory.mktemp("before")), target)
    [reading] = [r for r in learned.readings if all(getattr(r.config, k) == v for k, v in LEARNED.items())]
    net = learned.net
    net.config = reading.config
    followed, _ = conventions._written(target)
    batch = make_batch(Texts.of([followed], [2], [0.0], [0]), [0])
    with torch.no_grad():
        states = target.states(batch.tokens, reading.config.layers)
    number = torch.full((target.vocab_size,), -100)
    number[net.token_ids] = torch.arange(len(net.token_ids))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(40):
        features, _ = training_features(net, LossInput(batch, states, target.input_embedding, [1.0] * 3))
        truth = [number[batch.token_at(d + 1)].where(batch.left > d, -100) for d in range(3)]
        loss = F.cross_entropy((features @ net.head.weight.T).flatten(0, 1), torch.cat(truth))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    names = eagle3.names(net.config, "layers.0.")
    tensors = {names.get(own, own): x.detach() for own, x in net.state_dict().items() if own != "token_ids"}
    folder = tmp_path_factory.mktemp("trained")
    type(tiny)(tiny.config, tiny.tensors | tensors).write(folder)
    return folder


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
