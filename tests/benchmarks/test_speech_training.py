"""Drafters for speech learn from the target's transcripts, and change no text."""

import torch

from benchmarks.training.speech import SpeechExample, distill, distill_recurrent, speech_examples
from redrafter import Shape
from redrafter.drafters import NgramDrafter
from redrafter.drafters import speech as drafts
from redrafter.engine import speech as speech_engine
from redrafter.engine.speech import Transcriber
from tests.helpers.whispers import END, VOCAB, make_target, sounds


def test_distilling_helps():
    target = make_target(dtype=torch.float32)
    transcriber = Transcriber(target, NgramDrafter())
    windows = sounds(*(0.3 + 0.05 * i for i in range(12)))
    assert not list(speech_examples(transcriber, windows[:2]))  # texts without an end
    transcriber.eos = tuple(range(50, VOCAB))
    data = list(speech_examples(transcriber, windows))
    draft = drafts.shorten(target, [0], VOCAB)
    losses = []
    frozen = target.model.model.decoder.layers[0].fc1.weight.clone()
    distill(draft, target, data, updates=40, lr=3e-3, report=lambda update, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert torch.equal(frozen, target.model.model.decoder.layers[0].fc1.weight)


def test_a_recurrent_drafter(tmp_path):
    """On the decoder's hidden state: it learns, is stored and found again, and changes nothing in the texts."""
    target = make_target(dtype=torch.float32)
    transcriber = Transcriber(target, NgramDrafter())
    windows = sounds(*(0.3 + 0.05 * i for i in range(8)))
    features = transcriber.features(windows)
    heard = target.encode_audio(features)
    data = []
    for sound, (_, written, _) in zip(heard, transcriber.write(features, heard), strict=True):
        tokens = torch.tensor([*target.opening, *written])
        data.append(SpeechExample(sound, tokens[:-1], tokens[1:, None], torch.ones(len(tokens) - 1, 1)))
    losses = []
    drafter = distill_recurrent(
        target, data, guessable=40, updates=60, lr=1e-2, report=lambda update, loss: losses.append(loss)
    )
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert drafter.net.token_ids.tolist() == [*range(39), END]
    drafter.save(tmp_path / "drafter", target)
    found = speech_engine._resolve(tmp_path / "drafter", target, "en")
    fast = Transcriber(target, found, shape=Shape(width=2, length=3))
    for temperature in (0.0, 0.9):
        done, plain = (t.transcribe(windows, temperature=temperature, seed=3) for t in (fast, transcriber.plain()))
        assert [t.tokens for t in done] == [t.tokens for t in plain]
        assert sum(t.steps for t in done) < sum(t.steps for t in plain)
