"""Whisper as a target of our own step: its texts are plain decoding's, and its drafter's guesses help."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from redrafter import Gamma, Shape
from redrafter.drafters import NgramDrafter
from redrafter.drafters import speech as drafts
from redrafter.engine.speech import PACKAGE, Transcriber, load_speech
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.interop import wav
from redrafter.targets.speech import SpeechCache, SpeechTarget
from tests.helpers.whispers import END, SILENT, START, Letters, make_model, make_target, sounds

CLIPS = Path(__file__).parents[2] / "benchmarks" / "data" / "audio"
WER_BOUND = 0.10
"""Of tiny.en on the clips; it was 0.043 when this was written."""


def texts(target, drafter, shape=None, **options):
    return [
        t.tokens for t in Transcriber(target, drafter, shape=shape).transcribe(sounds(0.9, 0.4, 0.7, 2.3), **options)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["self", "shortened", "stranger", "ngram"])
def test_speculative_equals_plain(kind, temperature):
    target = make_target()
    drafter = {
        "self": lambda: target,
        "shortened": lambda: drafts.shorten(target, [0, 1], 40),
        "stranger": lambda: make_target(layers=1),  # with ears of its own
        "ngram": NgramDrafter,
    }[kind]()
    plain = Transcriber(target, drafter).plain().transcribe(sounds(0.9, 0.4, 0.7, 2.3), temperature=temperature, seed=3)
    done = Transcriber(target, drafter, shape=Shape(width=3, length=3)).transcribe(
        sounds(0.9, 0.4, 0.7, 2.3), temperature=temperature, seed=3
    )
    assert [t.tokens for t in done] == [t.tokens for t in plain]
    assert len({tuple(t.tokens) for t in plain}) == 4  # what is heard matters
    assert sum(t.steps for t in plain) == sum(len(t.tokens) - t.windows for t in plain)
    if kind == "self":
        assert all(t.tokens_per_step > 2 for t in done)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("gamma", ["heuristic", "confidence:0.2"])
def test_gamma(gamma, temperature):
    """However far the draft model guesses, the same texts."""
    target = make_target()
    windows = sounds(0.9, 0.4, 0.7)
    options = {"temperature": temperature, "seed": 3}
    plain = [t.tokens for t in Transcriber(target, NgramDrafter()).plain().transcribe(windows, **options)]
    draft = drafts.shorten(target, [0, 1], 40)
    done = Transcriber(target, draft, gamma=Gamma.of(gamma)).transcribe(windows, **options)
    assert [t.tokens for t in done] == plain
    with pytest.raises(ConfigError, match="gamma is for a speech drafter"):
        Transcriber(target, NgramDrafter(), gamma=Gamma.of(gamma))


def test_batches_do_not_matter():
    target = make_target()
    assert texts(target, target, batch_size=1) == texts(target, target, batch_size=8)


def test_as_transformers_writes_it():
    """The bare model, no cache, one token after another under the same bans."""
    target = make_target()
    transcriber = Transcriber(target, target)
    sound = sounds(0.9)[0]
    states = target.encode_audio(transcriber.features([sound]))
    ids = list(target.opening)
    assert ids == [START, SILENT]
    with torch.no_grad():
        while ids[-1] != END and len(ids) - 2 < target.max_positions // 2:
            logits = target.model(encoder_outputs=(states,), decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            logits[[3, 4, START, SILENT] + ([5, END] if len(ids) == 2 else [])] = -torch.inf
            ids.append(int(logits.argmax()))
    assert transcriber.transcribe([sound])[0].tokens == ids[2:]


def test_twins_fail(monkeypatch):
    """Broken on purpose: a commit that forgets the path, and rows that keep another row's sound."""
    target = make_target()
    true = texts(target, target)
    with monkeypatch.context() as patch:
        patch.setattr(SpeechCache, "commit", lambda self, lengths, path, count: None)
        assert texts(target, target, Shape(width=3, length=3)) != true
    keep = SpeechCache.keep

    def shifted(self, rows):
        keep(self, rows)
        for layer in self.cross.layers:
            layer.keys, layer.values = layer.keys.roll(1, 0), layer.values.roll(1, 0)

    plain = texts(target, NgramDrafter())
    monkeypatch.setattr(SpeechCache, "keep", shifted)
    assert texts(target, NgramDrafter()) != plain


# the draft model


def test_drafter_on_disk(tmp_path):
    target = make_target(dtype=torch.float32)
    draft = drafts.shorten(target, [2], 40)
    drafts.write(tmp_path / "d", draft, target)
    back = drafts.read(tmp_path / "d", target)
    assert back.layer_count == 1
    assert back.vocab_size == 40
    assert drafts.shares_encoder(back, target)
    for name, weights in drafts.trained_parts(draft).state_dict().items():
        assert (drafts.trained_parts(back).state_dict()[name] - weights).abs().max() < 0.01
    with pytest.raises(DrafterMismatch, match="does not fit"):
        drafts.read(tmp_path / "d", _narrower())
    with pytest.raises(ConfigError, match="layers must be"):
        drafts.shorten(target, [3], 40)


def _narrower() -> SpeechTarget:
    model = make_model(dtype=torch.float32)
    for layer in model.model.decoder.layers:
        layer.fc1 = torch.nn.Linear(32, 24)
        layer.fc2 = torch.nn.Linear(24, 32)
    return SpeechTarget(model, Letters())


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="no speech model is installed")
def test_real_weights():
    """tiny.en on two clips: few wrong words, and guesses change nothing."""
    jiwer = pytest.importorskip("jiwer")
    said = dict(line.split("\t") for line in (CLIPS / "transcripts.tsv").read_text().splitlines())
    names = sorted(said)[:2]
    recordings = [wav.read(CLIPS / name) for name in names]
    transcriber = load_speech(drafter="none")
    written = transcriber.transcribe(recordings)
    tidy = [words(t.text) for t in written]
    assert jiwer.wer([words(said[n]) for n in names], tidy) < WER_BOUND
    target = transcriber.target
    again = Transcriber(target, drafts.shorten(target, [0, 1, 2], 8192)).transcribe(recordings)
    assert [t.text for t in again] == [t.text for t in written]
    assert sum(t.steps for t in again) < sum(t.steps for t in written)


def words(text: str) -> str:
    """Lower case, no punctuation; `mister` as Whisper writes it."""
    kept = "".join(c if c.isalnum() or c in "' " else " " for c in text.lower())
    return " ".join("mr" if word == "mister" else word for word in kept.split())


@pytest.mark.parametrize(
    ("recordings", "options", "says"),
    [
        (torch.zeros(9), {}, "recordings must be a list, got tensor"),
        ([5], {}, "recordings[0] must be of type Tensor, got 5"),
        ([torch.zeros(9, dtype=torch.int16)], {}, "recordings[0] must be one row of samples at 16000 Hz"),
        ([torch.zeros(9), torch.zeros(1, 9)], {}, "recordings[1] must be one row of samples at 16000 Hz"),
        ([torch.tensor([0.0, math.nan])], {}, "recordings[0] has samples that are no numbers"),
        ([torch.full((9,), 1e30)], {}, "recordings[0] has samples that are no numbers"),
        ([], {"batch_size": "2"}, "batch_size must be a whole number, got '2'"),
        ([], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([], {"temperature": -1}, "temperature must be at least 0, got -1"),
        ([], {"seed": None}, "seed must be a whole number, got None"),
        ([], {"progress": 5}, "progress must be a function, got 5"),
    ],
    ids=range(11),
)
def test_wrong_arguments_of_transcribe(recordings, options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Transcriber(make_target(), NgramDrafter()).transcribe(recordings, **options)


def test_wrong_arguments_of_a_transcriber():
    target = make_target()
    for call, says in (
        (lambda: Transcriber(5, NgramDrafter()), "target must be of type SpeechTarget, got 5"),
        (lambda: Transcriber(target, 5), "a drafter is a name, a folder, a causal LM or a drafter object, not 5"),
        (lambda: Transcriber(target, NgramDrafter(), shape=5), "shape must be of type Shape or text, got 5"),
        (lambda: load_speech(5), "model must be text or of type Path, got 5"),
        (lambda: load_speech("a" * 5000), "model is no path that can be read (File name too long)"),
        (lambda: load_speech(language=None), "language must be text, got None"),
        (lambda: load_speech(gamma=5), "gamma must be of type Gamma or text, got 5"),
        (lambda: load_speech(device=0), "device must be text, got 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            call()


def test_samples_of_any_floating_point_type():
    transcriber = Transcriber(make_target(), NgramDrafter())
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        sound = sounds(0.3)[0].to(kind)
        assert transcriber.transcribe([sound])[0].tokens == transcriber.transcribe([sound.float()])[0].tokens
