"""Train a speech drafter for Whisper tiny.en on synthetic speech, on a CPU, in minutes.

    pip install 'redrafter[speech]' espeakng-loader
    python benchmarks/speech_drafter.py --text book.txt --out my-drafter

espeak-ng speaks sentences of a book in many voices, and the target transcribes the speech. The drafter is a copy of
some decoder layers, trained on the transcripts; with `--kind recurrent`, a recurrent drafter on the decoder's last
hidden state.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/speech_drafter.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import ctypes
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import bare_arguments, parse
from benchmarks.smoke import QUESTIONS, TinyFiles, tones
from benchmarks.training.speech import distill, distill_recurrent, speech_examples
from redrafter.drafters import speech
from redrafter.engine.speech import load_speech
from redrafter.interop.wav import RATE, resample
from redrafter.results import check_new

VOICES = [
    f"{accent}+{voice}"
    for accent in ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
    for voice in ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4")
]
SYNCHRONOUS, SPEED, PITCH, CHARACTER, UTF8 = 2, 1, 3, 1, 1
"""Constants of espeak-ng's C interface."""


class Voice:
    """Speech synthesis by espeak-ng, which returns samples piece by piece through a callback."""

    def __init__(self) -> None:
        import espeakng_loader

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = str(Path(espeakng_loader.get_data_path()).parent)
        self.rate = self.library.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), 0)
        self.pieces: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = kind(self._take)  # keep a reference: espeak-ng holds none
        self.library.espeak_SetSynthCallback(self.callback)

    def _take(self, samples: Any, count: int, _: Any) -> int:
        if samples and count > 0:
            self.pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    def say(self, text: str, voice: str, speed: int, pitch: int) -> torch.Tensor:
        self.pieces.clear()
        self.library.espeak_SetVoiceByName(voice.encode())
        self.library.espeak_SetParameter(SPEED, speed, 0)
        self.library.espeak_SetParameter(PITCH, pitch, 0)
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, CHARACTER, 0, UTF8, None, None)
        self.library.espeak_Synchronize()
        sound = torch.frombuffer(bytearray(b"".join(self.pieces)), dtype=torch.int16).float() / 2**15
        return resample(sound, self.rate)


Say = Callable[[str, str, int, int], torch.Tensor]
"""Text, voice, speed and pitch -> samples at 16 kHz."""


def windows(text: str, count: int, seed: int, say: Say) -> list[torch.Tensor]:
    """Make windows of 4 to 28 seconds: consecutive sentences by one voice, with pauses and background noise."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if 12 < len(s) < 260]
    at = chance.randrange(len(sentences))
    made: list[torch.Tensor] = []
    while len(made) < count:
        want = chance.uniform(4, 28) * RATE
        voice, speed, pitch = chance.choice(VOICES), chance.randrange(130, 190), chance.randrange(30, 70)
        sound = torch.zeros(0)
        while len(sound) < want:
            more = say(sentences[at % len(sentences)], voice, speed, pitch)
            at += 1
            if len(sound) + len(more) > 29 * RATE:
                break
            sound = torch.cat([sound, more, torch.zeros(chance.randrange(2000, 8000))])
        if len(sound) >= RATE:
            hiss = torch.randn(len(sound)) * 10 ** chance.uniform(-4, -2)
            made.append(sound * chance.uniform(0.3, 1) + hiss)
    return made


def say_tones(text: str, voice: str, speed: int, pitch: int) -> torch.Tensor:  # noqa: ARG001
    """Replace espeak-ng in smoke runs."""
    return tones(len(text) / 40)


def smoke(tiny: TinyFiles) -> list[object]:
    text = tiny.new_folder() / "book.txt"
    text.write_text(" ".join(QUESTIONS))
    words = ["--model", tiny.whisper, "--text", text, "--out", tiny.new_folder()]
    return [*words, "--layers", 0, "--guessable", 64, "--windows", 4, "--updates", 2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--model", type=Path, help="Whisper folder (default: the installed tiny.en)")
    parser.add_argument("--text", type=Path, required=True, help="English book, plain text")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    parser.add_argument("--kind", choices=["layers", "recurrent"], default="layers")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="decoder layers to copy")
    parser.add_argument("--guessable", type=int, default=8192, help="size of the draft vocabulary")
    parser.add_argument("--windows", type=int, default=280, help="number of speech windows to train on")
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16: faster on a CPU with AMX")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, argv, smoke)
    args.out.mkdir(parents=True, exist_ok=True)
    check_new(args.out / "config.json")
    transcriber = load_speech(args.model, drafter="none", dtype="bf16" if args.bf16 else None)
    began = time.perf_counter()
    say: Say = say_tones if args.smoke else Voice().say
    spoken = windows(args.text.read_text(), args.windows, args.seed, say)
    print(f"{sum(map(len, spoken)) / RATE / 60:.0f} minutes of speech, {time.perf_counter() - began:.0f} s")
    data = []
    for example in speech_examples(transcriber, spoken):
        data.append(example)
        if len(data) % 40 == 0:
            print(f"{len(data)} windows transcribed, {time.perf_counter() - began:.0f} s", flush=True)
    target = load_speech(args.model, drafter="none").target

    def report(update: int, loss: float) -> None:
        if update % 20 == 0:
            print(f"update {update}: loss {loss:.2f}, {time.perf_counter() - began:.0f} s", flush=True)

    if args.kind == "recurrent":
        options: dict[str, Any] = {
            "guessable": args.guessable,
            "updates": args.updates,
            "seed": args.seed,
            "report": report,
        }
        drafter = distill_recurrent(target, data, **options)
        drafter.save(args.out, target, storage="int8")
        return
    draft = speech.shorten(target, args.layers, args.guessable)
    distill(draft, target, data, updates=args.updates, lr=5e-4, bf16=args.bf16, report=report)
    speech.write(args.out, draft, target)


if __name__ == "__main__":
    main()
