"""Question suites, and the folders in which their files are found."""

import os
from pathlib import Path

from redrafter.errors import ConfigError
from redrafter.questions import Question, read_questions

SUITES = {
    "mt_bench": (("mt_bench.jsonl",), "80 questions of two turns in 8 categories; lm-sys/FastChat"),
    "alpaca_eval": (("alpaca_eval.jsonl",), "805 instructions; tatsu-lab/alpaca_eval"),
    "spec_bench": (
        ("spec_bench.jsonl", "question.jsonl"),
        "480 questions of 6 tasks; hemingkx/Spec-Bench; not part of this repository",
    ),
    "humaneval": (("humaneval.jsonl",), "164 functions to complete; openai/human-eval"),
    "gsm8k": (("gsm8k.jsonl", "gsm8k_eval_80.jsonl"), "80 sums in words; SafeAILab/EAGLE's selection"),
    "cnn_dm": (
        ("cnn_dm.jsonl", "cnn_dm_80.jsonl"),
        "80 articles to summarise; SafeAILab/EAGLE's selection; this repository has 20 of them",
    ),
}
VARIABLE = "REDRAFTER_DATA"


def folders() -> list[Path]:
    """Return the folders to search: $REDRAFTER_DATA, then benchmarks/data in the source tree and the working folder."""
    own = os.environ.get(VARIABLE)
    return [
        *([Path(own)] if own else []),
        Path(__file__).parents[3] / "benchmarks" / "data",
        Path("benchmarks") / "data",
    ]


def find(suite: str) -> Path:
    """Return the file of a suite by name, or the path itself if `suite` is a file."""
    if Path(suite).is_file():
        return Path(suite)
    if suite not in SUITES:
        raise ConfigError(f"no suite {suite!r}: use one of {', '.join(SUITES)}, or a file of JSON lines with 'turns'")
    names, what = SUITES[suite]
    looked = folders()
    for folder in looked:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError(
        f"the suite {suite} ({what}) was not found: put its questions as {names[0]} into {looked[0]}, or set "
        f"{VARIABLE} to their folder"
    )


def questions(suite: str, limit: int | None, turns: int | None) -> list[Question]:
    """Return at most `limit` questions, spread evenly over the suite, with at most `turns` turns each."""
    found = read_questions(find(suite), limit)
    return [Question(q.turns[:turns], q.category, q.id) for q in found]
