"""Whisper tiny.en on six clips: word error rate, tokens/step, and the time of plain and speculative decoding.

    pip install 'redrafter[speech]'
    python benchmarks/speech.py                          # plain decoding and n-gram drafts
    python benchmarks/speech.py --drafter my-drafter     # also a speech drafter

Each clip is decoded alone. The log-mel features and the encoder are the same for all contenders and are timed once.
Contenders take turns decoding; their times are medians over the rounds.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/speech.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jiwer
import torch

from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.drafters import NgramDrafter, speech
from redrafter.engine.speech import Transcriber, load_speech
from redrafter.interop import wav
from redrafter.results import check_new, write_results


def words(text: str) -> str:
    """Normalise a text: lower case, no punctuation, `mister` abbreviated as Whisper does."""
    kept = "".join(c if c.isalnum() or c in "' " else " " for c in text.lower())
    return " ".join("mr" if word == "mister" else word for word in kept.split())


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--model", tiny.whisper, "--clips", tiny.clips, "--rounds", 1, "--threads", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--model", type=Path, help="Whisper folder (default: the installed tiny.en)")
    parser.add_argument("--clips", type=Path, default=HERE / "data" / "audio", help="WAV files and transcripts.tsv")
    parser.add_argument("--drafter", type=Path, help="folder of a speech drafter")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1, 2, 3, 4], metavar="L", help="tokens the drafter drafts per step"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--save", type=Path, default=HERE / "results" / "speech.json", help="path of the results (JSON)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    torch.set_num_threads(args.threads)

    transcripts = dict(line.split("\t") for line in (args.clips / "transcripts.tsv").read_text().splitlines())
    recordings = [wav.read(args.clips / name) for name in transcripts]
    plain = load_speech(args.model, drafter="none")
    began = time.perf_counter()
    features = [plain.features([sound]) for sound in recordings]
    encoded = [plain.target.encode_audio(one) for one in features]
    encoding = time.perf_counter() - began

    contenders = {"plain": plain, "ngram": Transcriber(plain.target, NgramDrafter())}
    if args.drafter:
        draft = speech.read(args.drafter, plain.target)
        for length in args.lengths:
            contenders[f"drafter 1x{length}"] = Transcriber(plain.target, draft, shape=Shape(width=1, length=length))

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    written: dict[str, list[Any]] = {}
    for turn in range(args.rounds + 1):
        for name, contender in contenders.items():
            began = time.perf_counter()
            written[name] = [contender.write(f, s)[0] for f, s in zip(features, encoded, strict=True)]
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    wer = jiwer.wer([words(t) for t in transcripts.values()], [words(text) for text, _, _ in written["plain"]])
    base = statistics.median(seconds["plain"])
    rows: list[dict[str, Any]] = []
    for name, texts in written.items():
        tokens, steps = sum(len(t) for _, t, _ in texts), sum(stats.steps for _, _, stats in texts)
        took = statistics.median(seconds[name])
        rows.append(
            {
                "drafter": name,
                "tokens": tokens,
                "steps": steps,
                "tokens_per_step": round((tokens - len(texts)) / steps, 3),
                "decoding_seconds": round(took, 4),
                "rounds": [round(s, 4) for s in seconds[name]],
                "speedup": round(base / took, 3),
                "speedup_with_hearing": round((base + encoding) / (took + encoding), 3),
                "texts_equal_plain": sum(a[1] == b[1] for a, b in zip(texts, written["plain"], strict=True)),
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "rounds"})
    best = max(
        (row for row in rows if row["drafter"].startswith("drafter")), key=lambda row: row["speedup"], default=None
    )
    headline = {
        "wer": round(wer, 4),
        "clips": len(transcripts),
        "audio_seconds": round(sum(len(s) for s in recordings) / wav.RATE, 2),
        "hearing_seconds": round(encoding, 3),
        "load_average": round(os.getloadavg()[0], 2),  # well above `threads`: other processes were running
        "best_tokens_per_step": max(row["tokens_per_step"] for row in rows),
    }
    if best:  # n-gram drafts are too few for a speedup beyond noise
        headline["drafter_speedup"] = best["speedup"]
    print(headline)
    write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
