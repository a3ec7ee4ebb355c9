"""Whisper tiny.en on six clips: wrong words, tokens/step, seconds plain and with guesses, by turns.

    pip install 'redrafter[speech]'
    python benchmarks/speech.py                          # plain and n-gram guesses
    python benchmarks/speech.py --drafter my-drafter     # also a speech drafter's

Each clip is decoded alone, as somebody waiting for it would. Hearing (log-mel features and the encoder) is the same for
all and is timed once; decoding is timed by turns, plain and with guesses, and the middle of the rounds counts.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import jiwer
import torch

from common import HERE
from redrafter.config import Shape
from redrafter.drafters import NgramDrafter, speech
from redrafter.engine.speech import Transcriber, load_speech
from redrafter.interop import wav
from redrafter.results import check_new, write_results


def words(text: str) -> str:
    """Lower case, no punctuation; `mister` as Whisper writes it."""
    kept = "".join(c if c.isalnum() or c in "' " else " " for c in text.lower())
    return " ".join("mr" if word == "mister" else word for word in kept.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, default=HERE / "data" / "audio", help="WAV files and transcripts.tsv")
    parser.add_argument("--drafter", type=Path, help="a folder of a speech drafter, besides n-gram guesses")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4], metavar="L", help="tokens it guesses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", type=Path, default=HERE / "results" / "speech.json", help="where the JSON goes")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    torch.set_num_threads(args.threads)

    said = dict(line.split("\t") for line in (args.clips / "transcripts.tsv").read_text().splitlines())
    recordings = [wav.read(args.clips / name) for name in said]
    plain = load_speech(drafter="none")
    began = time.perf_counter()
    features = [plain.features([sound]) for sound in recordings]
    heard = [plain.target.encode_audio(one) for one in features]
    hearing = time.perf_counter() - began

    ways = {"plain": plain, "ngram": Transcriber(plain.target, NgramDrafter())}
    if args.drafter:
        draft = speech.read(args.drafter, plain.target)
        for length in args.lengths:
            ways[f"drafter 1x{length}"] = Transcriber(plain.target, draft, shape=Shape(width=1, length=length))

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    written = {}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            written[name] = [way.write(f, s)[0] for f, s in zip(features, heard, strict=True)]
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    wer = jiwer.wer([words(t) for t in said.values()], [words(text) for text, _, _ in written["plain"]])
    base = statistics.median(seconds["plain"])
    rows = []
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
                "speedup_with_hearing": round((base + hearing) / (took + hearing), 3),
                "texts_equal_plain": sum(a[1] == b[1] for a, b in zip(texts, written["plain"], strict=True)),
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "rounds"})
    best = max(
        (row for row in rows if row["drafter"].startswith("drafter")), key=lambda row: row["speedup"], default=None
    )
    headline = {
        "wer": round(wer, 4),
        "clips": len(said),
        "audio_seconds": round(sum(len(s) for s in recordings) / wav.RATE, 2),
        "hearing_seconds": round(hearing, 3),
        "load_average": round(os.getloadavg()[0], 2),  # well above `threads`: others were at work, times are rough
        "best_tokens_per_step": max(row["tokens_per_step"] for row in rows),
    }
    if best:  # n-gram guesses are too few to change anything but by noise
        headline["drafter_speedup"] = best["speedup"]
    print(headline)
    write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
